"""What only the stand-in has: which line of the host it imitates, a small inference engine, the record of a run."""
