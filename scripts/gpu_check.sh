#!/usr/bin/env bash
# Everything that needs a GPU, in one command of eight minutes at most; no network. Arguments go to pytest.
# Where the GPU has memory for it, test modules run at the same time; the benchmark runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
gigabytes=$(python3 -c 'import torch; print(torch.cuda.mem_get_info()[0] >> 30)')
# By name, so that tests of the server, which need more packages, are not even imported.
long="tests/models/|runtime/checkpoints|test_graphs|test_kernel_limits|test_kernels|test_olmo_hybrid|tests/train/"
rest=$(grep -rlE "mark\.gpu" tests --include="test_*.py" | grep -vE "$long" | sort)
groups=( # files | expression that chooses among their tests
  "tests/runtime/test_graphs.py|explicit"
  "tests/runtime/test_graphs.py|not explicit"
  "tests/runtime/checkpoints/test_cuda.py|explicit and not eager"
  "tests/runtime/checkpoints/test_cuda.py|not explicit or eager"
  "tests/train/test_cuda.py|option"
  "tests/train/test_cuda.py|scalar"
  "tests/train/test_cuda.py|linear"
  "tests/examples/test_olmo_hybrid.py|served"
  "tests/examples/test_olmo_hybrid.py|not served"
  "tests/models/test_cuda.py|engine"
  "tests/models/test_cuda.py|not engine"
  "tests/models/test_fidelity.py|"
  "tests/models/test_gemma4.py|directory"
  "tests/models/test_gemma4.py|not directory"
  "tests/ops/test_kernel_limits.py|gemma"
  "tests/ops/test_kernel_limits.py|not gemma and delta"
  "tests/ops/test_kernel_limits.py|not gemma and not delta"
  "tests/ops/test_kernels.py|"
  "${rest//$'\n'/ }|"
)
for file in $(grep -rlE "mark\.gpu" tests --include="test_*.py"); do
  [[ "${groups[*]}" == *"$file"* ]] || { echo "no group has $file" >&2; exit 1; }
done
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
check() {
  local code=0 files=${groups[$1]%|*} only=${groups[$1]#*|}
  python3 -m pytest -m "gpu and not slow" -k "$only" -rA --show-capture=no -q -p no:cacheprovider --durations=5 \
    $files "${@:2}" > "$logs/$1" 2>&1 || code=$?
  printf '== %s\n%s\n== %s ended with %s after %s s\n' "${groups[$1]}" "$(< "$logs/$1")" "${groups[$1]}" "$code" "$SECONDS"
  echo "$code" > "$logs/$1.code"
}
for i in "${!groups[@]}"; do
  check "$i" "$@" &
  ((gigabytes >= 100)) || wait
done
wait
for i in "${!groups[@]}"; do
  [[ $(cat "$logs/$i.code") == 0 ]] || { echo "GPU tests failed: ${groups[i]}" >&2; exit 1; }
done
python3 -m scripts.bench_engine --size 0.8B --workload race,quality_all --seeded 0
