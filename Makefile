# Everything runs in a virtual environment of this checkout; nothing else is needed but Python, make and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core
PIP := $(BIN)/python -m pip install -q -c constraints.txt
# Editable, with the build tools of the environment. Warnings are errors, and so is a core that can't be built.
INSTALL := SAKIYOMI_REQUIRE_CORE=1 PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation \
  -C build-dir=build/dev -C cmake.define.SAKIYOMI_WERROR=ON -e

.PHONY: demo test check sanitize bench clean

demo: $(CORE)  ## Answer a prompt on real weights, drafts in green; then find out what pays on the built-in prompts.
	$(BIN)/sakiyomi generate --show-drafts --stats -n 160 \
	  "Copy this text, with every 'red' changed to 'grey': The red fox crossed the river. The red fox saw the moon over \
	the river. The red fox went home before the moon was gone."
	$(BIN)/sakiyomi tune

test: check  ## Every check: style, types, sanitizers, tests.
	$(BIN)/python -m pytest

check: $(CORE)  ## Style, types, and the core under sanitizers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.cpp csrc/*.h csrc/*.inl tests/*.cpp
	$(BIN)/mypy
	@# The linker keeps one copy of an inline function, perhaps one with instructions that a processor lacks.
	@! nm -C build/dev/CMakeFiles/sakiyomi_core.dir/csrc/kernels_a*.o 2>/dev/null | grep ' [WVu] ' | grep -v DW.ref || \
	  { echo "csrc/kernels_*.cpp: the functions above must be static or in an unnamed namespace"; exit 1; }
	@$(MAKE) --no-print-directory sanitize

sanitize: $(CORE)  ## The core's tests, with builds that stop at bad accesses, undefined behaviour and races.
	@set -e; PATH="$(abspath $(BIN)):$$PATH"; mkdir -p build/sanitize; cd build/sanitize; \
	if ! (echo 'int main() {}' | $(CXX) -fsanitize=address,undefined -x c++ -o probe - && ldd probe | grep -q libasan) \
	  >/dev/null 2>&1; then echo "sanitize: skipped, needs Linux and g++ with its sanitizers"; exit 0; fi; \
	cmake -G Ninja -DCMAKE_CXX_COMPILER=$(CXX) -DSAKIYOMI_SANITIZE=ON ../.. >cmake.log || { cat cmake.log; exit 1; }; \
	ninja --quiet; \
	cd ../..; $(CXX) -std=c++17 -O1 -g -fsanitize=thread -Icsrc -o build/sanitize/pool tests/pool_test.cpp csrc/pool.cpp \
	  -pthread; build/sanitize/pool; library=$$PWD/build/sanitize/libsakiyomi_core.so; \
	SAKIYOMI_CORE_LIBRARY=$$library LD_PRELOAD="$$(ldd $$library | awk '/lib(asan|ubsan)/ { print $$3 }' | xargs)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 python -m pytest --capture=sys tests/test_core.py \
	  tests/test_suffix.py

bench: $(CORE)  ## The measured figures of the README (about ten minutes).
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/sakiyomi bench --repeats 3

# torch comes first and pinned: a bare requirement may bring builds for accelerators that nobody here uses.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch scikit-build-core cmake ninja
	$(INSTALL) '.[dev]'
	touch $(STAMP)

# Builds what changed.
$(CORE): $(STAMP) CMakeLists.txt $(wildcard csrc/*)
	$(INSTALL) . --no-deps
	touch $(CORE)

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
