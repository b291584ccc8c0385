"""``relax-tq-rdma bench soak``: does the data plane stay correct, and stay the same, for as long as it is left alone?

A producer and one or two consumers move random batches through real TransferQueue managers and Mooncake over TCP, with
normalise, dedup and host staging on. Consumers hold on to what they got until the pool is at its cap. Every byte is
compared when it arrives and once more when it is let go of; what each process holds is sampled until the end.

Reading order: :mod:`.content` what is moved, :mod:`.schedule` in which order, :mod:`.worker` the processes,
:mod:`.drive` the run, :mod:`.verdict` what must hold.
"""
