"""``relax-tq-rdma bench path``: what a byte costs on each way through the data plane, next to what the machine allows.

One run, all cases in turn in every repeat, so that drift hits them alike. A producer and a consumer process stay up for
the whole run and move data only through the store; every batch that arrives is compared with what was sent.

Reading order: :mod:`.cases` what is measured, :mod:`.measure` the run, :mod:`.worker` the processes, :mod:`.figures`
medians and ratios, :mod:`.report` how they are shown.
"""
