# Thin names for the scripts. Arguments: make demo ARGS="--steps 3", make test ARGS="-k ledger".
.PHONY: help setup demo test lint unit integration host test-rdma test-rdma-full clean

help:
	@echo "make demo         set up, then run the main job       (scripts/demo.sh)"
	@echo "make test         set up, then run every check        (scripts/test.sh)"
	@echo "make lint | unit | integration | host    one part of it   (scripts/test.sh PART)"
	@echo "make test-rdma         real verbs in a soft-RoCE guest, the fast set (docs/testing-rdma.md)"
	@echo "make test-rdma-full    every RDMA test, in two guests on one network"
	@echo "make setup        build .venv only                    (scripts/setup.sh)"
	@echo "make clean        remove .venv and caches"

setup:
	@scripts/setup.sh

demo:
	@scripts/demo.sh $(ARGS)

test:
	@scripts/test.sh all $(ARGS)

lint:
	@scripts/test.sh lint

unit integration host:
	@scripts/test.sh $@ $(ARGS)

test-rdma:
	@scripts/test.sh rdma $(ARGS)

test-rdma-full:
	@scripts/test.sh rdma-full $(ARGS)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
