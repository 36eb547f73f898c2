"""Files of the repository that benchmarks read and write."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SIMULATOR_SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
KUAIRAND_SPEC = ROOT / "conf" / "specs" / "kuairand.yaml"
DEMO_SIMULATOR = ROOT / "conf" / "simulator" / "demo.yaml"
BENCH_SIMULATOR = ROOT / "conf" / "simulator" / "bench.yaml"
RESULTS = ROOT / "benchmarks" / "results"  # study results that the documentation shows
