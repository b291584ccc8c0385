"""The host's own RDMA data plane (an open pull request), as far as a plugin sees it."""
