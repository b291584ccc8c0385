"""``relax-tq-rdma doctor``: what a job with these flags would do here, and why, before it is started."""
