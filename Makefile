# Makefile: a thin front for Meson. `make run` does the main job, `make test` runs every test; both set up what they need.
.PHONY: all run test test-long lint mutate check-long bench clean
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# The library and the tool; once `make test` has run, the tests too.
all:
	@scripts/setup.sh build
	@scripts/configure.sh
	@ninja -C build

run:
	@scripts/run.sh

test:
	@scripts/test.sh

# What CI runs beside the tests: the other half of the random problems, planted faults, very many batches and heads.
test-long:
	@scripts/setup.sh test
	@scripts/test_long.sh

lint:
	@scripts/setup.sh ci
	@scripts/lint.sh

# Changes one line of host code at a time, in a copy of the tree: the test beside it in scripts/mutations.py must fail.
mutate:
	@scripts/setup.sh test
	@python3 scripts/mutate.py

# Millions of random problems and long fuzzing; what was run is in docs/verified.md.
check-long:
	@scripts/setup.sh ci
	@scripts/check_long.sh

bench:
	@scripts/setup.sh test
	@pip install -q --no-deps --no-build-isolation --config-settings=build-dir=build-wheel .
	.venv/bin/python -m flash_dmattn.bench

clean:
	rm -rf build build-*
