"""``relax-tq-rdma train``: a Relax job with the plugin, from the command line."""
