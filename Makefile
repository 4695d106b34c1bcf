# `make demo` and `make test` do all the set-up they need. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := dinov2-small

.DEFAULT_GOAL := help
.PHONY: help demo run reproduce named-recipe named-output test test-slow crash-test fuzz check fmt bench bench-table bench-gpu docs clean model data

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vlmembed needs Python 3.11 or newer; run make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

model: $(READY)
	$(BIN)/vlmembed models --get $(MODEL)

demo: model  ## set up, embed the sample pictures, show the result
	$(BIN)/vlmembed run pipelines/demo.toml
	$(BIN)/vlmembed inspect out/demo.parquet

# What a recipe needs: the built-in model, unless it or SET names another.
names_model = grep -E '^"?model"? *=' '$(RECIPE)' | grep -qv '"$(MODEL)"'
own_model = $(if $(filter model=%,$(SET)),,$(names_model) || $(BIN)/vlmembed models --get $(MODEL))
sets = $(foreach setting,$(SET),--set '$(setting)')

named-recipe:
	$(if $(RECIPE),,$(error name a recipe, such as pipelines/folder.toml: make run RECIPE=FILE [SET='limit=10 output=out/try.parquet'], make reproduce RECIPE=FILE AGAINST=OUTPUT))
	@test -f '$(RECIPE)' || { echo 'there is no recipe $(RECIPE); there are: $(wildcard pipelines/*.toml)' >&2; exit 2; }

named-output: named-recipe
	@case '$(AGAINST)' in *://*) ;; *) test -e '$(AGAINST)' || { echo 'there is no output $(AGAINST) to compare with' >&2; exit 2; };; esac
	$(if $(AGAINST),,$(error name the output to compare with: make reproduce RECIPE=$(RECIPE) AGAINST=OUTPUT))
	$(if $(filter $(abspath $(again)),$(abspath $(AGAINST))),$(error $(AGAINST) is where it would be made again: move it, or give REPRODUCED=FOLDER))

run: named-recipe $(READY)  ## run RECIPE=pipelines/x.toml [SET='limit=10 model=x']
	$(own_model)
	$(BIN)/vlmembed run '$(RECIPE)' $(sets)

# Beside the others in REPRODUCED, under the name of AGAINST and of its kind: a file, a Lance dataset or a folder. Nothing
# is taken from a cache, an earlier output or an earlier try, and rows that fail are left to the comparison.
REPRODUCED := out/reproduce
against = $(notdir $(patsubst %/,%,$(firstword $(subst ?, ,$(AGAINST)))))
again = $(REPRODUCED)/$(against)$(if $(filter %.parquet %.lance,$(against)),,/)
reproduce: named-output $(READY)  ## run RECIPE=x.toml again and compare with AGAINST=out.parquet
	$(own_model)
	rm -rf '$(again).partial' '$(again)_partial'
	$(BIN)/vlmembed run '$(RECIPE)' $(sets) --set output='$(again)' --set overwrite=true --set retry-failed= \
		--set cache= --set reuse= --set format= --set work-dir= --set max-error-rate=1
	$(BIN)/vlmembed verify '$(again)' --against '$(AGAINST)'

# The labelled pictures behind the accuracy test: a Debian package, unpacked here, never committed.
STAMPS := .data/tuxpaint-stamps
PILLOW_IMAGES := .data/pillow-images
data: $(STAMPS) $(PILLOW_IMAGES)
$(STAMPS):
	sh tests/fetch_stamps.sh $@
# Odd and broken pictures: the test images of Pillow's source package.
$(PILLOW_IMAGES): | $(READY)
	sh tests/fetch_pillow_images.sh $@ $(BIN)/python

# Two at a time, each with a core of its own: most of the time goes into starting processes.
test: model data  ## set up, run the tests
	VLMEMBED_STAMPS=$(STAMPS) VLMEMBED_PILLOW_IMAGES=$(PILLOW_IMAGES) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slow: $(READY)  ## run what takes minutes: full-size towers (10 GB of memory), downloads
	$(BIN)/python -m pytest -m slow

crash-test: $(READY)  ## kill runs at many moments, and at every file operation
	$(BIN)/python -m pytest -m crash -s tests/test_crash.py

fuzz: $(READY)  ## feed mutated Parquet files and pictures for ten minutes
	$(BIN)/python tests/fuzz.py --seconds 600

check: $(READY)  ## lint, types, import contracts, the command line's reference; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/cli_reference.py --check

fmt: $(READY)  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## write docs/cli.md, the reference of the command line
	$(BIN)/python docs/cli_reference.py

# Daft and Ray Data, which peers.py compares with, want other versions of what is installed here.
PEERS := .data/peers-venv
$(PEERS)/.ready: pipelines/benchmarks/peers.txt
	rm -rf $(PEERS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r $<
	touch $@

bench: model data $(PEERS)/.ready  ## run the benchmarks, two hours; results go to pipelines/benchmarks/results
	$(BIN)/python pipelines/benchmarks/peers.py
	$(BIN)/python pipelines/benchmarks/tower_limit.py
	$(BIN)/python pipelines/benchmarks/feeding.py
	$(BIN)/python pipelines/benchmarks/scale.py
	$(BIN)/python pipelines/benchmarks/ray_engine.py
	$(BIN)/python pipelines/benchmarks/ray_peers.py
	$(BIN)/python pipelines/benchmarks/ray_scale.py
	$(BIN)/python pipelines/benchmarks/packing.py
	$(BIN)/python pipelines/benchmarks/towers.py
	$(BIN)/python pipelines/benchmarks/cache.py
	$(BIN)/python pipelines/benchmarks/deterministic.py
	$(BIN)/python pipelines/benchmarks/plan.py
	$(BIN)/python pipelines/benchmarks/table.py

bench-table: $(READY)  ## the floors of all result files once more, without measuring
	$(BIN)/python pipelines/benchmarks/table.py

bench-gpu: model  ## the same for a machine with a GPU: numerics, then speeds beside their floors
	$(BIN)/python pipelines/benchmarks/gpu.py

clean:  ## remove everything that was built, installed or downloaded here
	rm -rf $(VENV) .data out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
