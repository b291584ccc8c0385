"""As in Megatron: ``mpu`` is another name of ``parallel_state``, and no module."""

from megatron.core import parallel_state

mpu = parallel_state
