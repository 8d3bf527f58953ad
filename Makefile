# make lab        a virtual environment in .venv, then JupyterLab on the first notebook; at once from the second time on
# make install    only the environment
# make test       the gate, without a GPU, from nothing, in about half an hour: every notebook as a learner gets it, ruff,
#                 mypy, the tests; whole what changed, and a sample of what tests/proven.json says is proved. It ends with
#                 where its time went
# make test CHAPTER=04   of it what an author of chapter 04 needs, whole: its notebook as given and solved, its exercises
#                 with their wrong and unusual answers, style, imports, and that the notebook is the source's
# make prove      what follows from content alone and is not proved on this machine yet: answers, slips, kernels, solved
#                 notebooks. It writes tests/proven.json
# make test-all   everything, whole, for a release or a night: an hour. It writes tests/proven.json, too
# make test-gpu   what needs an NVIDIA GPU: the device's tests, the notebooks on it, the benchmarks
# make notebooks  notebooks/ built from solutions/
# make weights    the small models trained again, in four minutes of one core: what lies in course_lib/models/data/
# make site       the course as pages, in build/site/pages: each chapter run without a GPU, as given and solved; of those
#                 that have not changed what they gave is kept. CHAPTER=04 runs only that one
# make bench      the benchmarks; BENCH="name ..." picks some
#
# LAB_ARGS="--no-browser --port 8899"   is handed to JupyterLab
# PYTHON=python3.12                     makes the environment with this Python
# VENV=folder                           keeps the environment there, or uses the one that is there
# VENV=none                             uses the Python that is active (conda, a container's own torch): only what is
#                                       missing is installed, never torch or Triton
# TESTS="tests/kernels"                 runs only these; WORKERS=4 runs them on more cores; ARGS="-k causal" is handed
#                                       to pytest

VENV    ?= .venv
NOTEBOOK ?= notebooks/00_start_here.ipynb
CHAPTER ?=
TESTS   ?= $(if $(CHAPTER),$(of_a_chapter),tests notebooks build/solved)
WORKERS ?= 2

ifeq ($(VENV),none)
  python    := $(or $(PYTHON),python3)
  installed := install-missing
  ready     := install-missing-tools
  paged     := install-missing-pages
else
  python    := $(VENV)/bin/python
  installed := $(VENV)/.installed
  ready     := $(VENV)/.installed-dev
  paged     := $(VENV)/.installed-site
endif

# JupyterLab refuses to start as root, which is what one is in most containers, unless it is told to.
as_root := $(if $(filter 0,$(shell id -u)),--allow-root)

# JupyterLab asks each new user whether to fetch its news, over the notebook. In an environment of the course's own it does
# not ask; settings that are there stay.
no_news := $(if $(filter none,$(VENV)),,$(VENV)/share/jupyter/lab/settings/overrides.json)

# Tests and notebooks leave nothing in the learner's own .course, and two workers do not fight over the cores.
gate := COURSE_HOME="$(CURDIR)/build/course" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Where a chapter's tests are; pytest itself leaves out those of other chapters.
of_a_chapter = --chapter $(CHAPTER) tests/submissions tests/notebooks tests/test_style.py tests/test_imports.py \
  $(sources:solutions/%.py=notebooks/%.ipynb) $(sources:solutions/%.py=build/solved/%.ipynb)
sources = $(wildcard solutions/$(CHAPTER)_*.py)

# Whole where an author asks for a part; what is proved is sampled where the gate asks for all.
sampled := $(if $(or $(CHAPTER),$(filter command environment,$(firstword $(origin TESTS)))),,--sampled)

# A busy machine fails no notebook: each cell has half an hour.
pytest := -m pytest --nbmake --nbmake-timeout 1800 $(ARGS)
spread := -n $(WORKERS) --dist worksteal
solve   = rm -rf build/solved build/course && $(python) -m course_lib build --solved --out build/solved $(CHAPTER)

.PHONY: lab install test test-all prove known-chapter test-gpu notebooks weights bench site install-missing \
  install-missing-tools install-missing-pages
.DELETE_ON_ERROR:
.NOTPARALLEL:

lab: $(installed) $(no_news)
	@JUPYTER_PREFER_ENV_PATH=1 $(python) -m jupyter lab "$(NOTEBOOK)" $(as_root) $(LAB_ARGS)

install: $(installed)

test: known-chapter $(ready)
	@$(solve)
	@TRITON_INTERPRET=1 $(gate) $(python) $(pytest) $(sampled) $(spread) $(TESTS)

test-all: $(ready)
	@$(solve)
	@TRITON_INTERPRET=1 $(gate) $(python) $(pytest) --record $(spread) tests notebooks build/solved

prove: $(ready)
	@$(solve)
	@TRITON_INTERPRET=1 $(gate) $(python) $(pytest) --unproved --record $(spread) tests build/solved

# Without a chapter there is nothing to know.
known-chapter:
	@$(if $(CHAPTER),$(if $(sources),,echo "There is no chapter $(CHAPTER). CHAPTER takes one of these:" \
	  $(foreach source,$(wildcard solutions/*.py),$(firstword $(subst _, ,$(notdir $(source)))))"." >&2; exit 2))

test-gpu: $(ready)
	@rm -rf build/solved
	@$(python) -m course_lib build --solved --out build/solved
	@COURSE_HOME="$(CURDIR)/build/course" $(python) $(pytest) tests/gpu notebooks build/solved
	@$(python) -m course_lib bench $(BENCH)

notebooks: $(installed)
	@$(python) -m course_lib build

weights: $(installed)
	@$(python) -m course_lib.models.trained

bench: $(installed)
	@$(python) -m course_lib bench $(BENCH)

site: known-chapter $(paged)
	@$(python) -m course_lib site $(CHAPTER)

# The first Python here that the course runs on and that can make an environment; python3 gets to say why when none can.
$(VENV)/bin/python:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10, 10) or sys.version_info[:2] > (3, 13))' \
	      2>/dev/null; then python=$$candidate; break; fi; \
	  done; \
	fi; \
	python="$${python:-python3}"; \
	if ! command -v "$$python" >/dev/null; then \
	  echo "There is no $$python here. The course needs Python 3.10.10 to 3.13: install one, or name it with" \
	    "PYTHON=/path/to/python3.12." >&2; exit 1; \
	fi; \
	"$$python" course_lib/bootstrap.py environment "$(VENV)"

# The stamps are written last, so that an interrupted installation is taken up again.
$(VENV)/.installed: requirements.txt $(VENV)/bin/python
	@$(python) -m pip install --disable-pip-version-check -r requirements.txt
	@touch "$@"

$(VENV)/.installed-dev: $(wildcard requirements*.txt) $(VENV)/bin/python
	@$(python) -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch "$@" "$(VENV)/.installed" "$(VENV)/.installed-site"

$(VENV)/.installed-site: requirements-site.txt requirements.txt $(VENV)/bin/python
	@$(python) -m pip install --disable-pip-version-check -r requirements-site.txt
	@touch "$@" "$(VENV)/.installed"

%/share/jupyter/lab/settings/overrides.json: | $(installed)
	@mkdir -p $(@D)
	@printf '%s\n' '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' >"$@"

install-missing:
	@$(python) course_lib/bootstrap.py missing requirements.txt

install-missing-tools:
	@$(python) course_lib/bootstrap.py missing requirements-dev.txt

install-missing-pages:
	@$(python) course_lib/bootstrap.py missing requirements-site.txt
