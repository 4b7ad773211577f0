"""Find step, loss and other values in the output of rank 0, for a run that does not call metrics.log.

    iter 100: loss 2.31, time 12ms        {"step": 100, "loss": 2.31, "time": 1795264182.1}

What a line means is guessed from the shapes that training programs print, so the values are written to a file of their
own, beside metrics.jsonl and in its format (distributed/metrics.py). Status and report mark them. The supervisor of the
node of rank 0 does this, never a rank. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from contextlib import suppress

from distributed.launch.output_lines import rank_of
from distributed.metrics import FROM_OUTPUT, STEP_LIMIT, finite_or_none
from distributed.trust import parse_json, regular_file

MIN_INTERVAL, MAX_INTERVAL = 0.25, 5.0  # seconds between two entries
ENTRIES = 1000  # the interval is the duration of the attempt so far, divided by this number, within these limits
COST = 0.01  # maximum share of time that is spent on reading
LONGEST_PAUSE = 60.0  # seconds without reading, after a read that took long
BACKLOG = 1 << 19  # bytes of output that are kept until they are read
MOST_LINES, LONGEST = 300, 2000  # lines that are read for an entry, and characters of a line
PARSED = 500  # characters of a line that are parsed; the patterns take long for many digits
HINT = re.compile(rb"(?i)loss|step|iter|epoch|update|batch|train|episode|it/s|s/it")  # other lines are not read
# Patterns that are compiled on their first use: most runs are short, or log metrics themselves.
CONTROL = r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f]"  # colours, and other control characters
NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|(?:nan|[-+]?inf)\b)"
COUNT = r"\d[\d,]*(?!\d|\.\d|:\d)"
OF = rf"(?P<step>{COUNT})\s*/\s*(?P<steps>{COUNT})"
START = r"(?i)(?<![\w/.-])"
EPOCH = (
    rf"{START}(?:epoch(?:\(train\))?|(?P<train>train(?:ing)?))\s*[:=#]?\s*\[?\s*(?P<epoch>\d+(?:\.\d+)?)"
    rf"(?:\s*(?:/|of)\s*(?P<epochs>\d+))?\s*\]?(?:(?:\s*[:,|-]?\s*\[\s*|\s*:\s+|\s*[|-]\s*){OF})?"
)
ONLY_EPOCH = (  # only at the start of a message: elsewhere, "epoch" is often a word of other text
    r"(?i)(?:^|[\]|:>)-])\s*(?:end of )?epoch\s*[:=#]?\s*\[?\s*\d+(?:\s*/\s*\d+)?\]?\s*(?:[:|,-]|$)"
)
STEP = (
    rf"{START}(?<!max )(?<!warmup )(?<!every )(?<!per )(?:(?:global|train(?:ing|er)?|optimizer)[ _/.-]?)*"
    r"(?P<word>steps?|iter(?:ation)?s?|num_updates|updates?|episode|batch(?:_idx)?)(?:\(train\))?\s*[:=#]?\s*\[?\s*"
    rf"(?P<step>{COUNT})\]?(?:\s*(?:/|of|out of)\s*(?P<steps>{COUNT}))?"
)
UNIT = r"(?:it|iter|batch|step|update)"
BAR = (  # a progress bar of tqdm
    rf"(?:%\|[^|]*\|\s*|(?<!\S))(?P<step>{COUNT})(?:\s*/\s*(?P<steps>{COUNT})|it)\s*\[[^\],]*,"
    rf"\s*(?P<rate>\d+(?:\.\d+)?|\?)\s*(?P<unit>{UNIT}/s|s/{UNIT})"
)
BARS = (  # bars of Keras and rich; then counts such as [10/100]; then counts such as 10/100 steps
    rf"(?:^|[━╸╺])\s*{OF}\s",
    rf"\[\s*{OF}\s*(?:\(\s*[\d.]+%\s*\)\s*)?\]",
    rf"(?i)(?<![\w/.-]){OF}\s*(?:batches|steps|iter(?:ation)?s|updates)\b",
)
PREPARATION = r"(?i)\b(?:down)?load|\b(?:pre)?process|\b(?:map|filter|token|extract|generat|pack|pars|cach|sav)"
TRAINING_TASK = r"(?i)^(?!.*[a-z]{3})|epoch|train|iter|step|batch|progress|fit|rank|gpu"  # the text before a bar
NOT_TRAINING = r"(?i)\b(?:val|valid(?:at\w+)?|eval\w*|test(?:ing)?|sanity|inference|predict\w*)\b(?![:.]\w)"
PER_SECOND = r"[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?)?\b"
TOKENS = rf"(?:tok(?:en)?s?{PER_SECOND}|tps|wps)"
SAMPLES = rf"(?:samples|images|imgs?|examples){PER_SECOND}"
VALUES = {
    "loss": (
        rf"{START}(?<!best )(?<!lowest )(?<!min )"
        r"(?:(?:train(?:ing)?|trn|total|lm|avg|average|mean|running|batch)[ _/.-]*)*loss"
        rf"(?:[ _/]*train(?:ing)?)?(?:\s*[:=|]\s*|\s+(?:is\s+)?)(?:tensor\()?{NUMBER}"
    ),
    "lr": rf"(?i)(?<!\w)(?:lr|learning[ _-]?rate)\s*[:=]?\s*\[?{NUMBER}",
    "tokens_per_second": rf"(?i)\b{TOKENS}\s*[:=]\s*{NUMBER}|(?<![\w.]){NUMBER}\s*{TOKENS}(?!\s*[:=])",
    "samples_per_second": rf"(?i)\b{SAMPLES}\s*[:=]\s*{NUMBER}|(?<![\w.]){NUMBER}\s*{SAMPLES}(?!\s*[:=])",
}
SUMMARY = "train_runtime"  # in the last line of Hugging Face's Trainer, with the average loss
OTHER_VALUE = r"(?i)(?<!\w)(?:time|acc\w*|ppl|perplexity|mfu|grad\w*|reward|eta|error|elapsed)\b\W*\d"

GROUPS = ("step", "steps", "epoch", "epochs", "steps_per_second", *VALUES)  # known groups of a --progress expression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set

Values = dict[str, float]
# Values in a line, and its priority: how likely its step is a step of the training. The priority is 0 without a step.
Found = tuple[Values, int]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def check_expression(expression: str) -> str:
    """What is wrong with the value of --progress, and the remedy; "" if nothing is."""
    try:
        groups = sorted(re.compile(expression).groupindex)
    except (re.error, OverflowError, RecursionError) as error:
        return f"not a regular expression of Python: {error}; correct it, or give 'off'"
    if unknown := [group for group in groups if group not in GROUPS]:
        return f"unknown group '{unknown[0]}'; the names of groups are {', '.join(GROUPS)}"
    if expression != "off" and not {"step", "epoch"} & {*groups}:
        return "no group with the name step or epoch; mark the number of the step, as in (?P<step>[0-9]+)"
    return ""


def parse(text: str) -> Found | None:
    """The values in a line of output; None if it has none."""
    text = re.sub(r"(\s{8})\s+", r"\1", text.replace("'", "").replace('"', ""))[:PARSED]
    if SUMMARY in text:
        return None
    found, epoch = values_in(text), re.search(EPOCH, text)
    if epoch and epoch["train"] and not epoch["step"]:
        epoch = None
    step = step_in(text, found, epoch)
    if step and is_evaluation(text, step):
        return None
    if epoch and not is_evaluation(text, epoch):
        found |= {name: number(epoch[name]) for name in ("epoch", "epochs") if epoch[name]}
    if step:
        found |= {name: number(step[name]) for name in ("step", "steps") if step[name]}
        return found, 1 + (step.re.pattern in (STEP, EPOCH)) + 2 * ("loss" in found)
    return (found, 0) if "loss" in found or ("epoch" in found and re.search(ONLY_EPOCH, text)) else None


def values_in(text: str) -> Values:
    """The values in a line, except step and epoch."""
    matches = {name: re.search(pattern, text) for name, pattern in VALUES.items()}
    if matches["loss"] and is_evaluation(text, matches["loss"]):
        del matches["loss"]
    found = {name: number(match[match.lastindex or 1]) for name, match in matches.items() if match}
    bar = re.search(BAR, text)
    if bar and bar["rate"] != "?" and (rate := number(bar["rate"])):
        found["steps_per_second"] = rate if bar["unit"].endswith("/s") else 1 / rate
    return found


def step_in(text: str, values: Values, epoch: re.Match[str] | None) -> re.Match[str] | None:
    """The match of the step in a line; None: no step. values: the other values in the line."""
    if epoch and epoch["step"]:
        return epoch
    if bar := re.search(BAR, text):
        task = text[: bar.start()].rpartition("]")[2].rpartition(" - ")[2]
        if "loss" in values or (re.search(TRAINING_TASK, task) and not re.search(PREPARATION, task)):
            return bar
    step = re.search(STEP, text)
    if step and is_step(step, text, values):
        return step
    if epoch or "loss" in values:
        return next((match for pattern in BARS if (match := re.search(pattern, text))), None)
    return None


def is_step(match: re.Match[str], text: str, values: Values) -> bool:
    """Whether this is the number of a step, instead of, for example, the size of a batch or step 2 of a recipe."""
    word, has_value = match["word"].lower(), bool(values or re.search(OTHER_VALUE, text))
    if word.startswith("batch"):
        return has_value and bool(match["steps"])
    if word in ("steps", "iters", "iterations", "updates"):
        return "loss" in values
    return has_value or match[0].strip() == text.rstrip()


def is_evaluation(text: str, match: re.Match[str]) -> bool:
    """Whether a word shortly before the match shows that the value is not from the training."""
    return bool(re.search(NOT_TRAINING, text[max(0, match.start() - 24) : match.start() + 1]))


class Steps:
    """Counts the steps of an attempt, also if the training counts from 0 or 1 in each epoch.

    A step belongs to the next epoch if it is less than half of the previous step, or if it is lower than the previous
    step and a progress bar ended at the previous step. Lines of a lower priority than an earlier line do not count, nor
    do progress bars with fewer steps, which usually show an evaluation.
    """

    def __init__(self, first_epoch: float | None) -> None:
        """first_epoch: 0 or 1, if known from an earlier attempt."""
        self._first_epoch = first_epoch
        self._priority, self._last, self._total, self._offset = -1, 0.0, math.nan, 0.0
        # Whether a line's epoch is used as its step if it has no step. False after a line with a fraction of an epoch.
        self._counts_epochs = True

    def resolve(self, values: Values, priority: int) -> Values:
        """Replace step and steps by those of the whole training. The result is empty if the line does not count."""
        epoch, epochs = values.get("epoch", math.nan), values.get("epochs", math.nan)
        step, steps = values.get("step", math.nan), values.get("steps", math.nan)
        values = {name: value for name, value in values.items() if name not in ("step", "steps", "epochs")}
        self._counts_epochs &= math.isnan(epoch) or epoch.is_integer()
        if not priority and epoch.is_integer() and self._counts_epochs:
            step, steps, epoch = epoch, epochs, math.nan
        is_shorter = priority < 3 and steps < self._total
        if math.isnan(step) or priority < self._priority or (priority == self._priority and is_shorter):
            return {} if priority else values
        if priority > self._priority:
            self._last = self._offset = 0.0
        if epoch.is_integer() and step <= steps:
            if self._first_epoch is None:
                self._first_epoch = min(epoch, 1.0)
            self._offset, total = max(0.0, epoch - self._first_epoch) * steps, epochs * steps
        else:
            if step < self._last / 2 or (step < self._last and self._last >= self._total):
                continues = math.isnan(steps) or steps == self._total
                counted = self._offset + (self._last if math.isnan(steps) else steps)
                self._offset = counted if continues else 0.0
            total = math.nan if self._offset else steps
        self._priority, self._last, self._total = priority, step, steps
        counts = {"step": self._offset + step, "steps": total}
        return values | {name: int(count) for name, count in counts.items() if counts["step"] <= count < STEP_LIMIT}


class OutputMetrics:
    """Reads the output of an attempt from time to time, and appends the newest values to a file."""

    def __init__(self, metrics: str, expression: str, ranks: Set[int] = frozenset({0})) -> None:
        """metrics: path of metrics.jsonl, whose existence ends the search. expression: of --progress, or "".

        ranks: whose output is read.
        """
        self._ranks = ranks
        self._metrics, self._file = metrics, os.path.join(os.path.dirname(metrics), FROM_OUTPUT)
        self._expression = re.compile(expression) if expression else None
        self._hint = re.compile(b"") if expression else HINT
        self._unread = bytearray()
        self._started = time.monotonic()
        self._due = self._started + MIN_INTERVAL
        first_epoch = None
        with suppress(OSError, ValueError, LookupError, TypeError), open(self._file, "rb", opener=regular_file) as file:
            first_epoch = min(parse_json(file.readline())["epoch"], 1.0)
        self._steps, self._step = Steps(first_epoch), Values()  # _step: the newest one, for lines without a step

    def feed(self, lines: bytes) -> None:
        """Take complete lines of the output of all ranks."""
        self._unread += lines
        del self._unread[:-BACKLOG]

    def read(self, last: bool = False) -> None:
        """Append the newest values if an entry is due. last: the output has ended."""
        now = time.monotonic()
        if not self._unread or (now < self._due and not last):
            return
        values = {} if os.path.exists(self._metrics) else self._newest_values()
        self._unread.clear()
        if values:
            line = {"time": time.time()} | {name: finite_or_none(value) for name, value in values.items()}
            # A failed write must not end the run.
            with suppress(OSError), open(self._file, "ab", buffering=0, opener=regular_file) as file:
                file.write(json.dumps(line).encode() + b"\n")
        ended = time.monotonic()
        interval = min(MAX_INTERVAL, max(MIN_INTERVAL, (ended - self._started) / ENTRIES))
        self._due = ended + min(LONGEST_PAUSE, max(interval, (ended - now) / COST))

    def _newest_values(self) -> Values:
        """The newest step and loss, which may be in different lines, and the newest other values in these lines."""
        lines = bytes(self._unread).split(b"\n")
        lines = [line for line in lines if self._hint.search(line) and rank_of(line) in self._ranks]
        found: list[Found] = []
        for line in reversed(lines[-MOST_LINES:]):
            if values := self._parse(plain(line)):
                found.append(values)
                if {"step", "loss"} <= {name for one, _ in found for name in one}:
                    break
        newest: Values = {}
        for one in reversed(found):
            newest |= self._steps.resolve(*one)
        if "step" in newest:
            self._step = {"step": newest["step"]}
        return self._step | newest if newest and (self._step or "epoch" in newest) else {}

    def _parse(self, text: str) -> Found | None:
        if not self._expression:
            return parse(text)
        match = self._expression.search(text)
        groups = match.groupdict("") if match else {}
        found = {name: number(value) for name, value in groups.items() if re.fullmatch(NUMBER, value, re.IGNORECASE)}
        return (found, 3 * ("step" in found)) if found else None


def plain(line: bytes) -> str:
    """The text of a line, without its prefix, colours and other control characters."""
    return re.sub(CONTROL, "", line.partition(b"] ")[2].decode(errors="replace").rstrip("\r")[:LONGEST])
