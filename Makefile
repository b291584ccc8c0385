# Thin names for the scripts. Arguments: make demo ARGS="--steps 3", make test ARGS="-k ledger".
.PHONY: help setup demo test lint unit integration clean

help:
	@echo "make demo         set up, then run the main job       (scripts/demo.sh)"
	@echo "make test         set up, then run every check        (scripts/test.sh)"
	@echo "make lint | unit | integration      one part of it    (scripts/test.sh PART)"
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

unit integration:
	@scripts/test.sh $@ $(ARGS)

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
