# Needs Python 3.11 or newer; everything else is set up on first use.
.PHONY: help setup demo test check docs bench clean

help:
	@echo 'make demo    clean up a small warehouse and show what happens'
	@echo 'make test    run the test suite'
	@echo 'make check   format, lint, types, import directions, documentation'
	@echo 'make docs    build the documentation'
	@echo 'make bench   run the measurements'
	@echo 'make clean   remove everything that was made here, .venv too'

setup:
	@scripts/setup

demo: setup
	@JAVA_HOME="$$(scripts/java)" && export JAVA_HOME && .venv/bin/lakewarden demo

test: setup
	@scripts/test

check: setup
	@scripts/check

docs: setup
	@scripts/docs

bench: setup
	@scripts/bench

clean:
	rm -rf .venv build dist artifacts docs/_build spark-warehouse metastore_db derby.log
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
