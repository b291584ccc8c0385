"""The few names of Megatron-LM that the host's data path uses."""
