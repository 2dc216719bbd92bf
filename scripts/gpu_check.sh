#!/usr/bin/env bash
# Everything that needs a GPU, in one command of eight minutes at most; no network. Arguments go to pytest.
# Where the GPU has memory for it, test modules run at the same time; the benchmark runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
gigabytes=$(python3 -c 'import torch; print(torch.cuda.mem_get_info()[0] >> 30)')
# By name, so that tests of the server, which need more packages, are not even imported.
rest=$(grep -rlE "mark\.gpu" tests --include="test_*.py" | grep -vE "tests/models/|test_graphs|test_kernel_limits" | sort)
groups=(
  "tests/ops/test_kernel_limits.py"
  "tests/models"
  "tests/runtime/test_graphs.py"
  "tests/runtime/test_graphs.py"
  "${rest//$'\n'/ }"
)
only=("" "" "explicit" "not explicit" "")
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
check() {
  local code=0
  python3 -m pytest -m "gpu and not slow" -k "${only[$1]}" -rA --show-capture=no -q -p no:cacheprovider \
    ${groups[$1]} "${@:2}" > "$logs/$1" 2>&1 || code=$?
  echo "$code" > "$logs/$1.code"
}
for i in "${!groups[@]}"; do
  check "$i" "$@" &
  ((gigabytes >= 100)) || wait
done
wait
failed=0
for i in "${!groups[@]}"; do
  echo "== ${groups[i]} ${only[i]}"
  cat "$logs/$i"
  [[ $(cat "$logs/$i.code") == 0 ]] || failed=1
done
((failed == 0)) || { echo "GPU tests failed" >&2; exit 1; }
python3 -m scripts.bench_engine --size 0.8B --workload race,quality_all --seeded 0
