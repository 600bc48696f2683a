# Makefile: a thin front for Meson. `make run` does the main job, `make test` runs every test; both set up what they need.
MESON := .venv/bin/meson
NINJA := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/ninja
BUILD := build
EXAMPLE := examples/minilm/qkv.safetensors

.PHONY: all run test lint check-long bench clean

all: $(BUILD)/build.ninja
	@$(NINJA) -C $(BUILD) --quiet

$(BUILD)/build.ninja: meson.build meson.options
	@scripts/setup.sh build
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(MESON) setup $(BUILD) --reconfigure >/dev/null 2>&1 || \
	    PATH="$(CURDIR)/.venv/bin:$$PATH" $(MESON) setup $(BUILD)

# Attention with a dynamic top-64 mask, forward and backward, on tensors captured from a real sentence model reading real text.
run: all
	$(BUILD)/fdm attend $(EXAMPLE) --causal --topk 64 --backward --check

test:
	@scripts/setup.sh test
	@scripts/test.sh

lint:
	@scripts/setup.sh ci
	@scripts/lint.sh

# Millions of random problems and long fuzzing; what was run is in docs/verified.md.
check-long: all
	@scripts/setup.sh ci
	@scripts/check_long.sh

bench:
	@scripts/setup.sh test
	@PATH="$(CURDIR)/.venv/bin:$$PATH" pip install -q --no-deps --no-build-isolation -Cbuild-dir=build-wheel .
	.venv/bin/python -m flash_dmattn.bench

clean:
	rm -rf $(BUILD) build-*
