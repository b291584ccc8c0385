from relax.standin.line import more_paths

__path__ += more_paths("utils/data")
