"""The report as tables of text, for the terminal and for a page."""

from collections.abc import Iterable, Sequence

from benchmarks.papers.batch_max.accuracy import Accuracy
from benchmarks.papers.batch_max.methods import FULL_CACHE
from benchmarks.papers.batch_max.paper import PAPER_ROWS, PAPER_SETTING
from benchmarks.papers.batch_max.report import BatchMaxReport, Speed, TaskResult
from winnow.text_table import TextTable

PARTS = ("prefill", "decode", "evict", "host")


def all_tables(report: BatchMaxReport) -> tuple[TextTable, ...]:
    """Every table, in reading order."""
    return (
        speed_table(report, report.speeds, "Batches of fixed size, as in the paper"),
        task_table(report),
        parts_table(report.speeds, "Seconds per prompt with its answer, by part (medians)"),
        speed_table(report, report.continuous, f"Winnow's own scheduler, {report.config.requests} requests"),
        parts_table(
            report.continuous, "Seconds per prompt with its answer, by part, in Winnow's own scheduler"
        ),
        paper_table(report),
    )


def speed_table(report: BatchMaxReport, speeds: Sequence[Speed], title: str) -> TextTable:
    """Methods, batch sizes and rates, beside the fastest ED of the same table."""
    fastest = max((speed.rate for speed in speeds if speed.method.name == "ED"), default=0.0)
    rows = []
    if speeds is report.speeds:
        rows.append(("ED", (str(report.out_of_memory), "2", "", "out of memory", "", "")))
    for speed in speeds:
        least, most = speed.spread
        kvs = "all" if speed.method.max_kvs is None else str(speed.method.max_kvs)
        batch = str(speed.batch if speeds is report.speeds else max(run.most_running for run in speed.runs))
        memory = f"{max(run.kv_bytes for run in speed.runs) / 2**20:.1f}"
        rates = (f"{speed.rate:,.0f}", f"{least:,.0f}-{most:,.0f}", _percent(speed.rate / fastest - 1))
        if speeds is report.speeds and not speed.together:
            rates = (f"{rates[0]} (not all at once)", *rates[1:])
        rows.append((speed.method.name, (batch, kvs, memory, *rates)))
    batch_column = "b" if speeds is report.speeds else "at once, most"
    columns = (batch_column, "|kv|", "MiB used", "tokens/s", "least-most", "beside ED")
    return TextTable(title, "method", columns, tuple(rows))


def task_table(report: BatchMaxReport) -> TextTable:
    """For each task and rule: the largest batch that holds accuracy."""
    rows: list[tuple[str, tuple[str, ...]]] = []
    for task in report.tasks:
        full = task.full
        rows.append((task.name, (FULL_CACHE.name, "", "all", f"{full.mean:.3f}", "", "", "", "")))
        rows += [("", _rule_entries(report, task, rule)) for rule in report.config.rule_names]
    for rule in report.config.rule_names:
        gain = report.mean_gain(rule)
        told = "" if gain is None else _percent(gain)
        rows.append(("mean", (f"BM {rule}", "", "", "", "", "", told, "")))
    columns = ("method", "b", "|kv|", "accuracy", "of FKV", "tokens/s", "beside ED", "latest KVs")
    title = f"Accuracy within {report.config.within:g} % of the full cache: the largest batch of each rule"
    return TextTable(title, "task", columns, tuple(rows), words=(0,))


def _rule_entries(report: BatchMaxReport, task: TaskResult, rule: str) -> tuple[str, ...]:
    trial = task.best(rule)
    if trial is None:
        near = task.nearest(rule)
        if near is None:
            return (f"BM {rule}", "", "", "no batch fits", "", "", "", "")
        cells = (str(near.batch), str(near.method.max_kvs), _accuracy(near.accuracy))
        return (near.method.name, *cells, "too low", "", "none", "")
    speed = report.speed(trial.method, trial.batch)
    accuracy = trial.accuracy
    share = f"{accuracy.mean / task.full.mean:.1%} ± {accuracy.error_beside(task.full) / task.full.mean:.1%}"
    control = task.controls[trial.method.max_kvs or 0]
    latest = "too low" if task.discriminates(trial) else f"{control.mean:.3f}: as good"
    return (
        trial.method.name,
        str(trial.batch),
        str(trial.method.max_kvs),
        _accuracy(accuracy),
        share,
        f"{speed.rate:,.0f}",
        _percent(report.gain(trial)),
        latest,
    )


def parts_table(speeds: Iterable[Speed], title: str) -> TextTable:
    """Where the time goes."""
    rows = []
    for speed in speeds:
        parts = [speed.part(name) / speed.batch for name in PARTS]
        kvs = "all" if speed.method.max_kvs is None else str(speed.method.max_kvs)
        cells = (f"{each:.3f}" for each in (*parts, sum(parts)))
        rows.append((speed.method.name, (str(speed.batch), kvs, *cells)))
    return TextTable(title, "method", ("b", "|kv|", *PARTS, "sum"), tuple(rows))


def paper_table(report: BatchMaxReport) -> TextTable:
    """The paper's rows, and what held here below them."""
    rows: list[tuple[str, tuple[str, ...]]] = [
        (
            row.model,
            (
                row.task,
                row.setting,
                str(row.ed_batch),
                str(row.batch),
                str(row.max_kvs),
                f"{row.accuracy_share:.1%}",
                _percent(row.gain),
            ),
        )
        for row in PAPER_ROWS
    ]
    mean = sum(row.gain for row in PAPER_ROWS) / len(PAPER_ROWS)
    rows.append(("paper, mean", (*[""] * 6, _percent(mean))))
    for rule in report.config.rule_names:
        for task, trial in report.held(rule):
            cells = (str(report.extreme_decode.batch), str(trial.batch), str(trial.method.max_kvs))
            share = f"{trial.accuracy.mean / task.full.mean:.1%}"
            setting = f"0-shot, {task.metric}, {trial.method.name}"
            rows.append(("demo model", (task.name, setting, *cells, share, _percent(report.gain(trial)))))
    columns = ("task", "setting", "b of ED", "b of BM", "|kv|", "of FKV", "beside ED")
    return TextTable("Beside the paper", "model", columns, tuple(rows), notes=(PAPER_SETTING,), words=(0, 1))


def _accuracy(accuracy: Accuracy) -> str:
    told = f"{accuracy.mean:.3f}"
    return told if accuracy.complete else f"{told} of the first {len(accuracy.scores)}"


def _percent(share: float) -> str:
    return f"{share:+.0%}"
