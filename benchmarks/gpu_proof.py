"""Build, test and measure hstree on the GPU of this machine; see docs/gpu.md.

    python -m benchmarks.gpu_proof --out build/proof --minutes 9

Stages: build, tests (those marked cuda), sanitizer (the four tools of compute-sanitizer),
benchmarks (benchmarks.gpu), decoding (all classes, the most probable ones and draws, by
benchmarks/test_contests.py) and report. Each part runs in its own process with a time limit, and
results.json in the output folder is replaced after each part. A part that crashes, hangs or is
interrupted does not affect the others, and the next call resumes where this one stopped. Completed
parts are not repeated, unless the sources of hstree have changed or --again names them.

Exit status: 0 if all parts passed, 1 if a part of hstree failed, 2 if nothing can run here, 3 if
the time ran out, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import CONTESTANTS, SETTINGS, TINY, save
from benchmarks.gpu import Entry as Contestant

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("build", "tests", "sanitizer", "benchmarks", "decoding", "report")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = {
    "build": 480, "collect": 120, "tests": 240, "sanitizer": 240, "benchmarks": 120,
    "decoding": 300,
}  # fmt: skip
"""Time limits of the build, of collecting tests, of all tests, of each tool and contestant, and of
decoding."""
LEAST_SECONDS = 5.0
"""With less time left, no part is started."""
SANITIZED_PER_FILE = 8
SANITIZED = re.compile(r"equals_(the_)?reference|equals_the_walk|sparse_is_dense")
"""Tests that run every kernel, forward and backward, on small shapes of all kinds."""

REQUIREMENTS = {
    "everything": ("torch 2.11", "numpy", "scipy 1.11", "safetensors"),
    "build": ("pip", "setuptools 77.0.3", "ninja", "pybind11 3"),
    "tests, sanitizer": ("pytest 8", "pytest-xdist 3.6", "hypothesis 6.100", "expecttest"),
    "benchmarks": ("triton", "liger-kernel", "cut-cross-entropy", "quack-kernels"),
}
"""Distributions with their oldest versions, by what needs them."""
PROBE = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps({"name": p.name, "capability": f"{p.major}.{p.minor}", "torch": torch.__version__,
                  "cuda": torch.version.cuda, "memory_bytes": p.total_memory}))
"""
BUILT = """
import hstree
b = hstree.build_info()
print(f"hstree {b.version}, CUDA {b.cuda}, {b.cuda_arch_list}, torch {b.torch}, {hstree.__file__}")
"""
DECODING = """
import json, sys
from benchmarks.table import decoding, summary
from hstree.lm.report import markdown
print(markdown(*decoding(summary(json.load(open(sys.argv[1]))))))
"""
Entry = dict[str, Any]


class OutOfTime(Exception):
    """The time of this call is over; the next call resumes."""


# ---- one process


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    status: int | None  # negative for a signal, None at the limit
    seconds: float
    output: str  # standard output and error

    def __str__(self) -> str:
        if self.status is None:
            return f"limit of {self.seconds:.0f} s"
        if self.status < 0:
            return signal.Signals(-self.status).name
        return f"exit status {self.status}"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_limited(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Ending:
    """Run a command in the checkout and append its output to a file. At the end, also after an
    exception, kill the rest of its process group. ``started`` gets the process."""
    begin = time.monotonic()
    # A pytest around it is not that of the command.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    with log.open("a+b") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            started(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            kill_group(process)
            process.wait()
        file.seek(start)
        output = file.read().decode(errors="replace")
    return Ending(status, time.monotonic() - begin, output)


def last_lines(output: str, count: int = 8) -> str:
    return "\n".join(line[:300] for line in output.strip().splitlines()[-count:])


# ---- parsing of output


RESULT = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"


def results_of_tests(output: str) -> list[tuple[str, str]]:
    """Name and result of each test in the output of `pytest -v`, with or without `-n`."""
    alone = re.findall(rf"^([^\s\[].*?::.*?) ({RESULT})\b", output, re.MULTILINE)
    shared = re.findall(rf"^\[gw\d+\] \[ *\d+%\] ({RESULT}) (\S.*)$", output, re.MULTILINE)
    return alone + [(name.rstrip(), result) for result, name in shared]


def of_tests(ending: Ending) -> Entry:
    """Results of `pytest -v`, also of an incomplete run."""
    found = results_of_tests(ending.output)
    counts = Counter(result.lower() for _, result in found)
    failures = [name for name, result in found if result in ("FAILED", "ERROR")]
    entry: Entry = {"counts": dict(counts), "failures": failures}
    if ending.status == 0:
        return entry | {"outcome": "passed" if counts["passed"] else "skipped"}
    entry["outcome"] = "failed"
    if ending.status != 1 or not failures:
        started = [line for line in ending.output.splitlines() if "::" in line]
        killed = ending.status is None or ending.status < 0
        at = f", in {started[-1].strip()}" if killed and started else ""
        entry["detail"] = f"{ending}{at}\n{last_lines(ending.output)}"
    return entry


def of_sanitizer(ending: Ending) -> Entry:
    """Errors found by a tool of compute-sanitizer, by kernel; "errors elsewhere" if all are in
    kernels of other libraries."""
    summary = re.search(
        r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", ending.output
    )
    places = re.findall(r"=========.*?\bat (?:0x\w+ in )?(\S.*?)\+0x", ending.output)
    names = [re.search(r"hstree::.*?(\w+_kernel)\b", place) or place[:80] for place in places]
    kernels = Counter(n if isinstance(n, str) else f"hstree {n.group(1)}" for n in names)
    tests = of_tests(ending)
    entry: Entry = {"counts": tests["counts"], "kernels": dict(kernels.most_common(20))}
    if summary is None:
        said = f"{ending}, without a summary\n{last_lines(ending.output)}"
        return entry | {"outcome": "failed", "detail": said}
    errors = int(summary.group(1) or summary.group(2))
    ours = sum(count for name, count in kernels.items() if name.startswith("hstree"))
    if errors == 0 and ending.status == 0:
        return entry | {"outcome": "clean" if tests["counts"].get("passed") else "skipped"}
    outcome = "errors" if errors else "failed"
    if kernels and ours == 0 and ending.status == 0:
        outcome = "errors elsewhere"
    return entry | {
        "outcome": outcome,
        "detail": f"{errors} errors, {ours} reported places in kernels of hstree; tests: {ending}",
        "failures": tests["failures"],
    }


def of_contestant(ending: Ending, file: Path) -> Entry:
    """The results of benchmarks.gpu, however it ended."""
    entry: Entry = {}
    with contextlib.suppress(OSError, ValueError):
        entry = json.loads(file.read_text())
    if ending.status == 0 and entry.get("outcome", "unfinished") != "unfinished":
        return entry
    doing = f", while {entry.pop('doing')}" if "doing" in entry else ""
    outcome = "timed out" if ending.status is None else "crashed"
    detail = f"{ending}{doing}\n{last_lines(ending.output)}"
    return entry | {"outcome": outcome, "detail": detail}


# ---- the stages


def digest(*patterns: str) -> str:
    """Digest of the contents of files in the checkout."""
    found = hashlib.sha256()
    for path in sorted(p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()):
        if path.name != "_build_info.py" and path.suffix not in (".so", ".pyc"):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def spread_over(items: list[str], count: int) -> list[str]:
    """At most this many items, evenly from the first to the last. Step sizes differ by one, so that
    they do not select the same dtype each time."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


class Proof:
    """The results of all calls with one folder, and the remaining time of this call.

    Results are `entries` by name, "STAGE/...", with at least `outcome`, `seconds_taken` and
    `sources`, the digest of what was built.
    """

    def __init__(self, options: argparse.Namespace, device: Entry) -> None:
        self.options, self.out = options, options.out
        self.deadline = time.monotonic() + 60 * options.minutes
        self.file = self.out / "results.json"
        self.results: Entry = {"device": device, "calls": [], "entries": {}}
        if self.file.exists():
            self.results = json.loads(self.file.read_text())
        there = self.results["device"]["name"]
        if there != device["name"]:
            raise SystemExit(
                f"--out: {self.file} has results of {there}, but this device is {device['name']}; "
                "choose another folder"
            )
        self.entries: dict[str, Entry] = self.results["entries"]
        self.sources = digest("setup.py", "csrc/**/*", "hstree/**/*.py")
        self.results["calls"].append(
            {
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
                "sources": self.sources,
                "device": device,
            }
        )
        self.save()

    def save(self) -> None:
        save(self.file, json.dumps(self.results, indent=1) + "\n")

    def is_done(self, name: str, any_sources: bool = False) -> bool:
        entry = self.entries.get(name)
        if entry is None or entry["outcome"] == "missing":
            return False
        again = any(fnmatch(name, pattern) for pattern in self.options.again)
        return not again and (any_sources or entry["sources"] == self.sources)

    def limited(
        self,
        command: Sequence[str],
        seconds: float,
        log: str,
        environment: Mapping[str, str] = {},
        started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    ) -> Ending:
        """Run a command. Raises OutOfTime if the time of this call ends before the command and its
        limit."""
        left = self.deadline - time.monotonic()
        if left < min(LEAST_SECONDS, seconds):
            raise OutOfTime
        file = self.out / f"{log}.log"
        ending = run_limited(command, min(seconds, left), file, environment, started)
        if ending.status is None and left < seconds:
            raise OutOfTime
        return ending

    def limit(self, stage: str) -> float:
        return float(self.options.limit or SECONDS[stage])

    def keep(self, name: str, entry: Entry, ending: Ending | None = None) -> None:
        seconds = round(ending.seconds, 1) if ending else 0.0
        self.entries[name] = entry | {"seconds_taken": seconds, "sources": self.sources}
        self.save()
        detail = entry.get("detail", "").partition("\n")[0]
        print(f"{name}: {entry['outcome']} {detail} ({seconds:.0f} s)", flush=True)

    def build(self) -> None:
        """Install hstree in editable mode, unless the same sources are already installed."""
        probe = [sys.executable, "-c", BUILT]
        if self.is_done("build") and self.entries["build"]["outcome"] == "built":
            ending = self.limited(probe, 60, "build")
            if last_lines(ending.output, 1) == self.entries["build"]["detail"]:
                return
        cuda = self.options.device == "cuda"
        architecture = self.options.arch or self.results["device"]["capability"]
        environment = {"HSTREE_CUDA": "1" if cuda else "0"}
        if cuda:
            environment["TORCH_CUDA_ARCH_LIST"] = architecture
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-v"]
        command = [*pip, "--no-index", "--no-build-isolation", "--no-deps", "-e", "."]
        built = self.limited(command, SECONDS["build"], "build", environment)
        ending = built if built.status != 0 else self.limited(probe, 60, "build")
        if ending.status == 0:
            entry = {"outcome": "built", "detail": last_lines(ending.output, 1)}
        else:
            errors = re.findall(r"^.*\b(?:error|found|expected):.*$", ending.output, re.MULTILINE)
            said = [str(ending), last_lines("\n".join(errors)), last_lines(ending.output)]
            entry = {"outcome": "failed", "detail": "\n".join(said)}
        self.keep("build", entry, built)

    def _pytest(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"]
        return [*command, "--continue-on-collection-errors", "-m", "cuda", *arguments]

    def tests(self) -> None:
        """Run the tests on half of the processor's cores."""
        if self.is_done("tests"):
            return
        workers = str(max(1, (os.cpu_count() or 2) // 2))
        command = self._pytest(*self.options.tests, "-n", workers, "-v", "--tb=short")
        ending = self.limited(command, self.limit("tests"), "tests")
        self.keep("tests", of_tests(ending), ending)

    def sanitized(self) -> list[str]:
        """Some tests of each file."""
        command = [*self._pytest(*self.options.tests), "--collect-only", "-q"]
        ending = self.limited(command, SECONDS["collect"], "sanitizer")
        files: dict[str, list[str]] = {}
        for test, file in re.findall(r"^((\S+\.py)::.+)$", ending.output, re.MULTILINE):
            if SANITIZED.search(test):
                files.setdefault(file, []).append(test)
        return [test for of in files.values() for test in spread_over(of, SANITIZED_PER_FILE)]

    def sanitizer(self) -> None:
        tool = find_sanitizer(self.options.sanitizer)
        if tool is None:
            detail = f"{self.options.sanitizer} not found on PATH or in CUDA_HOME"
            self.keep("sanitizer", {"outcome": "missing", "detail": detail})
            return
        self.entries.pop("sanitizer", None)
        checks = [check for check in TOOLS if not self.is_done(f"sanitizer/{check}")]
        chosen = self.sanitized() if checks else []
        running: list[subprocess.Popen[bytes]] = []

        def run(check: str) -> Ending:
            # Errors of driver functions that torch expects and handles are ignored.
            more = ["--report-api-errors", "no"] if check == "memcheck" else []
            options = ["--tool", check, "--target-processes", "application-only", *more]
            options += ["--print-limit", "1000"]
            command = [tool, *options, *self._pytest(*chosen, "-v", "--tb=short")]
            environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            limit = self.limit("sanitizer")
            return self.limited(command, limit, check, environment, running.append)

        with ThreadPoolExecutor(len(TOOLS)) as pool:  # the tools at the same time
            try:
                for check, ending in zip(checks, pool.map(run, checks), strict=True):
                    self.keep(f"sanitizer/{check}", of_sanitizer(ending), ending)
            except BaseException:
                for process in running:
                    kill_group(process)
                raise

    def benchmarks(self) -> None:
        """Run the contestants of hstree in all settings, then the others."""
        chosen = [
            (setting, name)
            for setting in self.options.settings
            for name in CONTESTANTS
            if any(fnmatch(name, pattern) for pattern in self.options.contestants)
        ]
        for setting, name in sorted(chosen, key=lambda one: not CONTESTANTS[one[1]].ours):
            key, contestant = f"benchmarks/{setting}/{name}", CONTESTANTS[name]
            if not self.is_done(key, any_sources=not contestant.ours):
                self.contestant(key, setting, name, contestant)

    def contestant(self, key: str, setting: str, name: str, contestant: Contestant) -> None:
        title = {"title": contestant.title}
        if contestant.package and version_of(contestant.package) is None:
            detail = f"{contestant.package} is not installed"
            self.keep(key, title | {"outcome": "missing", "detail": detail})
            return
        file = self.out / ".contestant.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu", setting, name]
        command += ["--device", self.options.device, "--out", str(file)]
        try:
            ending = self.limited(command, self.limit("benchmarks"), "benchmarks")
            self.keep(key, title | of_contestant(ending, file), ending)
        finally:
            file.unlink(missing_ok=True)

    def decoding(self) -> None:
        """Run the contests of decoding on this device and keep their tables."""
        if self.is_done("decoding"):
            return
        run = self.out / "decoding.json"
        short = ["--benchmark-max-time=0.1"] if self.options.device == "cpu" else []
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-v"]
        command += ["benchmarks/test_contests.py", "-k", f"decoding and {self.options.device}"]
        command += ["--benchmark-only", f"--benchmark-json={run}", "-n", "0", *short]
        ending = self.limited(command, self.limit("decoding"), "decoding")
        entry = of_tests(ending)
        if entry["outcome"] == "passed":
            shown = self.limited([sys.executable, "-c", DECODING, str(run)], 60, "decoding")
            entry["outcome"] = "measured" if shown.status == 0 else "failed"
            entry["table"] = shown.output
        self.keep("decoding", entry, ending)

    def report(self) -> None:
        try:
            from benchmarks.gpu_report import page
        except Exception as error:  # hstree may be missing; the results remain
            print(f"no report: {type(error).__name__}: {error}", file=sys.stderr)
            return
        text = page(self.results)
        save(self.out / "report.md", text)
        print(f"\n{text}")

    def wrong(self) -> list[str]:
        """The failed parts of hstree; on a GPU also tests that did not run."""
        fine = {"built", "passed", "clean", "errors elsewhere", "measured", "missing"}
        if self.options.device == "cpu":
            fine.add("skipped")
        bad = []
        for name, entry in self.entries.items():
            contestant = CONTESTANTS.get(name.rpartition("/")[2])
            peer = contestant is not None and not contestant.ours
            if entry["outcome"] not in fine and not peer:
                bad.append(name)
        return bad


# ---- the machine


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def find_sanitizer(command: str) -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = [command, str(home / "bin" / command), str(home / "compute-sanitizer" / command)]
    return next((found for place in places if (found := shutil.which(place))), None)


def requirements(options: argparse.Namespace) -> list[str]:
    """One line for each available or missing requirement."""
    lines = []
    for purpose, wanted in REQUIREMENTS.items():
        for one in wanted:
            distribution, _, oldest = one.partition(" ")
            version, needed = version_of(distribution), f"{one}{' or newer' * bool(oldest)}"
            if version is None:
                lines.append(f"missing  {needed} ({purpose})")
            elif _numbers(version) < _numbers(oldest):
                lines.append(f"too old  {distribution} {version}: {needed} ({purpose})")
            else:
                lines.append(f"found    {distribution} {version}")
    programs = {"c++": shutil.which(os.environ.get("CXX", "c++").split()[0])}
    if options.device == "cuda":
        home = os.environ.get("CUDA_HOME")
        programs["nvcc (set CUDA_HOME)"] = (
            shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc")
        )
        programs["nvidia-smi"] = shutil.which("nvidia-smi")
        programs["compute-sanitizer"] = find_sanitizer(options.sanitizer)
    lines += [f"found    {path}" if path else f"missing  {name}" for name, path in programs.items()]
    return lines


def probe(device: str) -> Entry:
    """Name and capability of the device, from torch in a separate process, so that this one uses no
    memory on it."""
    if device == "cpu":
        return {"name": "cpu", "capability": None, "torch": version_of("torch"), "cuda": None}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        print(f"no GPU that torch can use:\n{last_lines(done.stderr, 3)}", file=sys.stderr)
        raise SystemExit(2)
    found: Entry = json.loads(done.stdout)
    return found


# ---- command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proof",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )

    def names(known: Collection[str]) -> Callable[[str], list[str]]:
        def convert(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f"expected some of {','.join(known)}, got {name!r}"
                    )
            return text.split(",")

        return convert

    def positive(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not number > 0:
            raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text!r}")
        return number

    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    add("--stage", type=names(STAGES), default=list(STAGES), help="some of " + ",".join(STAGES))
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes only")
    add("--minutes", type=positive, default=float("inf"),
        help="stop cleanly after this many minutes")  # fmt: skip
    add("--settings", type=names(SETTINGS), help="default: all; tiny on a CPU")
    add("--contestants", type=lambda text: text.split(","), default=["*"], metavar="NAMES",
        help="names or patterns with *, see python -m benchmarks.gpu --list")  # fmt: skip
    add("--limit", type=positive, metavar="SECONDS",
        help="time limit of the tests, of each tool and contestant, instead of {tests}, "
        "{sanitizer} and {benchmarks}".format(**SECONDS))  # fmt: skip
    add("--tests", nargs="+", default=["tests"], metavar="PATH", help="files or folders of tests")
    add("--again", nargs="+", default=[], metavar="PATTERN",
        help="repeat completed parts, such as tests or 'benchmarks/*/cut'")  # fmt: skip
    add("--arch", help="TORCH_CUDA_ARCH_LIST of the build; default: the device's capability")
    add("--sanitizer", default="compute-sanitizer", metavar="COMMAND")
    add("--check", action="store_true", help="list available and missing requirements, and exit")
    options = parser.parse_args(arguments)
    if options.settings is None:
        options.settings = [TINY] if options.device == "cpu" else [s for s in SETTINGS if s != TINY]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    print("\n".join(requirements(options)), flush=True)
    if options.check:
        return 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    proof = Proof(options, probe(options.device))
    status = 0
    try:
        for stage in STAGES[:-1]:
            if stage in options.stage:
                getattr(proof, stage)()
                if stage == "build" and proof.entries["build"]["outcome"] == "failed":
                    break
    except OutOfTime:
        status = 3
    except KeyboardInterrupt:
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    if "report" in options.stage:
        proof.report()
    for name in proof.wrong():
        print(f"FAILED: {name}: {proof.entries[name].get('detail', '')}")
    if status == 3:
        print("stopped by --minutes; run the same command to continue")
    return status or (1 if proof.wrong() else 0)


if __name__ == "__main__":
    sys.exit(main())
