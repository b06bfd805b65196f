"""Runs the scenarios and shows what became of them: python -m tests.scenarios [-j N] [WORD ...]

With words, only those scenarios whose group or name holds one of them. Exit code 1 unless every one
was as due.
"""

import argparse
import logging
import time
from collections import Counter

from tests.ports import held_ports
from tests.scenarios.cases import GROUPS, TWINS
from tests.scenarios.runner import Report, run_all
from tests.scenarios.scenario import Truth


def main() -> int:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "-j", "--jobs", type=int, default=8, help="so many side by side (default: 8)"
    )
    options = parser.parse_args()
    logging.getLogger("llama_worker").addHandler(logging.NullHandler())
    chosen = [
        scenario
        for group, scenarios in GROUPS.items()
        for scenario in scenarios
        if not options.words or any(word in f"{group} {scenario.name}" for word in options.words)
    ]
    reports = []
    began_at = time.monotonic()
    with held_ports() as take_port:
        for report in run_all(chosen, [take_port() for _ in range(options.jobs)]):
            show(report)
            reports.append(report)
    show_sum(reports, time.monotonic() - began_at)
    return 0 if reports and not any(report.wrong or report.is_late for report in reports) else 1


def show(report: Report) -> None:
    """One line, and what was wrong."""
    mark = "FAIL" if report.wrong else "LATE" if report.is_late else "ok  "
    verdict = "killed" if report.given_up else "spared"
    told = (
        f"{mark} {report.scenario.truth.value:4} {verdict} {report.took_s:5.1f} s  "
        f"{report.scenario.name}"
    )
    late = f"  (after its limit: {report.late_s:+.2f} s)" if report.late_s is not None else ""
    print(f"{told}{late}", *report.wrong, sep="\n     ", flush=True)


def show_sum(reports: list[Report], took_s: float) -> None:
    """The confusion matrix, and how soon the ends were found."""
    counts = Counter((report.scenario.truth, report.given_up) for report in reports)
    print(f"\n{'':6}{'killed':>8}{'spared':>8}")
    for truth in Truth:
        print(f"{truth.value:6}{counts[truth, True]:8}{counts[truth, False]:8}")
    for title, wanted in (
        ("hang found after its limit", Truth.HUNG),
        ("death to terminal status", Truth.DEAD),
    ):
        chosen = [
            report
            for report in reports
            if report.scenario.truth is wanted and not report.scenario.after_work
        ]
        times = sorted(report.late_s for report in chosen if report.late_s is not None)
        if times:
            print(
                f"{title}: median {times[len(times) // 2]:.3f} s, worst {times[-1]:.3f} s of "
                f"{len(times)}"
            )
    of_name = {report.scenario.name: report for report in reports}
    pairs = [pair for pair in TWINS if all(each.name in of_name for each in pair)]
    told_apart = sum(all(of_name[each.name].right for each in pair) for pair in pairs)
    print(f"{told_apart} of {len(pairs)} kinds of hang told from their honest twins")
    right = sum(report.right for report in reports)
    well = sum(not (report.wrong or report.is_late) for report in reports)
    print(
        f"{right} of {len(reports)} verdicts right, {well} scenarios as due in every point, "
        f"{took_s:.0f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
