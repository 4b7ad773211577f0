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
import signal
import time
from contextlib import contextmanager, suppress

from distributed.launch.output_lines import rank_of
from distributed.metrics import FROM_OUTPUT, STEP_LIMIT, finite_or_none
from distributed.trust import parse_json, regular_file

MIN_INTERVAL, MAX_INTERVAL = 0.25, 5.0  # seconds between two entries
ENTRIES = 1000  # the interval is the duration of the attempt so far, divided by this number, within these limits
COST = 0.01  # maximum share of time that is spent on reading
LONGEST_PAUSE = 60.0  # seconds without reading, after a read that took long
BACKLOG = 1 << 19  # bytes of output that are kept until they are read
MOST_LINES, LONGEST = 300, 2000  # lines that are read for an entry, and characters of a line
MOST_TIME = 0.5  # seconds of CPU time of one read: an expression of --progress may backtrack for ever
PARSED = 500  # characters of a line that are parsed; the patterns take long for many digits
# Other lines are not read. Dashes separate tables.
HINT = re.compile(rb"(?i)loss|step|iter|epoch|update|batch|train|episode|rate|it/s|s/it|^[^ ]* -----")
# Patterns that are compiled on their first use: most runs are short, or log metrics themselves.
CONTROL = r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f]"  # colours, and other control characters
# A number is read whole, with separators of thousands and a suffix of SUFFIXES, or not at all.
SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
THOUSANDS = r"\d{1,3}(?:[,_]\d{3})+"
SUFFIX = r"(?-i:[kKMGBT])"
PLAIN = rf"(?:(?:{THOUSANDS}|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?{SUFFIX}?"
END = r"(?!\w|\s?%|[.,:]\d)"
NUMBER = rf"([-+]?{PLAIN}|nan|[-+]?inf){END}"
INTEGER = rf"(?:{THOUSANDS}|\d+(?:e\d+|(?:\.\d+)?{SUFFIX})?)"
COUNT = rf"{INTEGER}{END}(?! \d{{3}}(?!\d))"
OF = rf"(?P<step>{COUNT})\s*/\s*(?P<steps>{COUNT})"
START = r"(?i)(?<![\w/.-])"
EPOCH = (
    rf"{START}(?:epoch(?:\(train\))?|(?P<train>train(?:ing)?))\s*[:=#]?\s*\[?\s*(?P<epoch>\d+(?:\.\d+)?)"
    rf"(?:\s*(?:/|of)\s*(?P<epochs>\d+))?\s*\]?(?:(?:\s*[:,|-]?\s*[\[(]\s*|\s*:\s+|\s*[|-]\s*){OF})?"
)
EPOCHS = (  # as in "[1,  2000] loss: 2.1", "[0/25][50/782] Loss_D: 1.2"; and of YOLO: "1/100  2.61G  0.654"
    r"(?i)^\s*\[(?P<epoch>\d+)(?:/(?P<epochs>\d+)\]\s*\[|,\s+)(?P<step>\d+)(?:/(?P<steps>\d+))?\](?=\s*loss)",
    r"^\s*(?P<epoch>\d+)/(?P<epochs>\d+)\s+[\d.]+G\s(?P<step>(?!))?",
)
SAMPLES_OF = r"(?i)\btrain epoch:\s*(?P<epoch>\d+)\s*\[\s*(?P<samples>\d+)/(?P<all>[1-9]\d*) \(\s*\d+%\)\]"
ONLY_EPOCH = (  # only at the start of a message: elsewhere, "epoch" is often a word of other text
    r"(?i)(?:^|[\]|:>)-])\s*(?:end of )?epoch\s*[:=#]?\s*\[?\s*\d+(?:\s*(?:/|of)\s*\d+)?\]?\s*(?:[:|,(-]|$)"
)
# Counts from the start of the training, whatever the epoch is.
GLOBAL = rf"(?i)(?<![\w.-])(?:num_updates|total_timesteps|global[ _-]?step)\s*[:=]?\s*(?P<step>{COUNT})(?P<steps>(?!))?"
STEP = (
    rf"{START}(?<!max )(?<!warmup )(?<!every )(?<!per )(?<!fps )"
    r"(?:(?:global|train(?:ing|er)?|optimizer|learning)[ _/.-]?)*"
    r"(?P<word>steps?|iter(?:ation)?s?|updates?|episode|batch(?:_idx)?)(?:\(train\))?\s*[:=#]?\s*\[?\s*"
    rf"(?P<step>{COUNT})\]?(?:\s*(?:/|of|out of)\s*(?P<steps>{COUNT}))?"
)
UNIT = r"(?:it|iter|batch|step|update)"
BAR = (  # a progress bar of tqdm or ultralytics
    rf"(?:%\|[^|]*\|\s*|%\s[━─╸]+\s|(?<!\S)(?<!\d ))(?P<step>{INTEGER})"
    rf"(?:\s*/\s*(?P<steps>{COUNT})|it)(?:\s*\[[^\],]*,|(?<=\d))"
    rf"\s*(?:[\d.]+{SUFFIX}?|\?)\s*(?:{UNIT}/s|s/{UNIT})"
)
BARS = (  # bars of Keras and rich; counts such as [10/100], 10/100 steps, and "100 steps, " at the start of a message
    rf"(?:^|[━╸╺])\s*{OF}\s",
    rf"\[\s*{OF}\s*(?:\(\s*[\d.]+%\s*\)\s*)?\]",
    rf"(?i)(?<![\w/.-]){OF}\s*(?:batches|steps|iter(?:ation)?s|updates)\b",
    rf"(?i)(?:^|[\]|:>])\s*(?P<step>{COUNT})\s*(?:batches|steps|iter(?:ation)?s|updates),(?P<steps>(?!))?",
)
PREPARATION = r"(?i)\b(?:down)?load|\b(?:pre)?process|\b(?:map|filter|token|extract|generat|pack|pars|cach|sav)"
TRAINING_TASK = r"(?i)^(?!.*[a-z]{3})|epoch|train|iter|step|batch|progress|fit|rank|gpu"  # the text before a bar
HELD_OUT = r"(?:val|valid(?:at\w+)?|eval|dev|held?[ _-]?out|hold[ _-]?out)"
NOT_TRAINING = rf"(?i)\b(?:{HELD_OUT}|eval\w*|test(?:ing)?|sanity|inference|predict\w*)\b(?![:.]\w)"
PER_SECOND = r"[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?)?\b"
TOKENS = rf"(?:tok(?:en)?s?{PER_SECOND}|tps|wps)"
SAMPLES = rf"(?:samples|images|imgs?|examples){PER_SECOND}"
IS = r"(?:\s?=\s*|\s*[:|]\s*|\s+(?:is\s+)?)(?:tensor\()?"
OF_ALL = r"(?:train(?:ing)?|trn|total|lm|avg|avr|average|mean|running|batch|step|epoch|iter|cross[ _-]?entropy)"
VALUES = {
    "loss": rf"{START}(?:(?<![a-z] )|(?<=\d[kmgbt] ))(?:{OF_ALL}[ _/.-]*)*loss(?:[ _/]*{OF_ALL})*{IS}{NUMBER}",
    "held_out_loss": (
        rf"(?i)(?<![\w.-])(?<!best )(?<!lowest )(?<!min ){HELD_OUT}[ _/.-]*(?:{OF_ALL}[ _/.-]*)?loss{IS}{NUMBER}"
        rf"|(?<![\w.-])loss[ _/-]*{HELD_OUT}\s*[:=]\s*{NUMBER}"
    ),
    "lr": rf"(?i)(?<!\w)(?:lr|learning[ _-]?rate)\s*[:=]?\s*\[?{NUMBER}",
    "tokens_per_second": rf"(?i)\b{TOKENS}\s*[:=]\s*{NUMBER}|(?<![\w.,/])({PLAIN})\s*{TOKENS}(?!\s*[:=])",
    "samples_per_second": rf"(?i)\b{SAMPLES}\s*[:=]\s*{NUMBER}|(?<![\w.,/])({PLAIN})\s*{SAMPLES}(?!\s*[:=])",
    "steps_per_second": rf"(?i)(?<![\w.,])({PLAIN})\s*{UNIT}/s(?:ec)?\b|(?<!\w)(?:train )?steps/sec:?\s+{NUMBER}",
}
SECONDS = (  # of a step: pattern, number in a second
    (rf"(?i)(?<![\w.,])({PLAIN})\s*us/{UNIT}\b", 1e6),
    (rf"(?i)(?<![\w.,])({PLAIN})\s*ms/{UNIT}\b|\bms/batch\s+{NUMBER}|\bstep_avg:({PLAIN})ms\b", 1e3),
    (rf"(?i)\btime(?: per |_per_)iteration(?: \(ms\)|_ms): {NUMBER}", 1e3),
    (rf"(?i)(?<![\w.,])({PLAIN})\s*s(?:ec)?/{UNIT}\b|\biter time \(s\): {NUMBER}", 1.0),
)
SUMMARY = "train_runtime"  # in the last line of Hugging Face's Trainer, with the average loss
OTHER_VALUE = r"(?i)(?<!\w)(?:train_time|time|acc\w*|ppl|perplexity|mfu|grad\w*|reward|eta|error|elapsed)\b\W*\d"
SETTINGS = r"[{(][^})]*$"  # before a plural such as steps: a dictionary or the arguments of a call
ROW = r"\|\s*(\w[\w/]*)\s*\|\s*(\S+)\s*\|"  # of a table, as in Stable-Baselines3

GROUPS = ("step", "steps", "epoch", "epochs", *VALUES)  # known groups of a --progress expression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Set

Values = dict[str, float]
# Values in a line, and its priority: how likely its step is a step of the training. The priority is 0 without a step.
Found = tuple[Values, int]


def number(text: str) -> float:
    text = text.replace(",", "").replace("_", "")
    return float(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else float(text)


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
    epoch = epoch or next((match for pattern in EPOCHS if (match := re.search(pattern, text))), None)
    if "held_out_loss" in found and "loss" not in found:
        return {"held_out_loss": found["held_out_loss"]}, 0  # its step may be one of the evaluation
    if samples := re.search(SAMPLES_OF, text):
        return found | {"epoch": number(samples["epoch"]) + number(samples["samples"]) / number(samples["all"])}, 0
    step = step_in(text, found, epoch)
    if step and is_evaluation(text, step):
        return None
    if epoch and not is_evaluation(text, epoch):
        found |= {name: number(epoch[name]) for name in ("epoch", "epochs") if epoch[name]}
    if step:
        found |= {name: number(step[name]) for name in ("step", "steps") if step[name]}
        if step.re.pattern == GLOBAL or (epoch and "steps" in found and step.start() < epoch.start()):
            found["whole"] = 1.0  # the step counts from the start of the training, whatever the epoch is
        return found, 1 + (step.re.pattern in (GLOBAL, STEP, EPOCH)) + 2 * ("loss" in found)
    return (found, 0) if "loss" in found or ("epoch" in found and re.search(ONLY_EPOCH, text)) else None


def values_in(text: str) -> Values:
    """The values in a line, except step and epoch."""
    matches = {name: re.search(pattern, text) for name, pattern in VALUES.items()}
    if matches["loss"] and is_evaluation(text, matches["loss"]):
        matches = {"held_out_loss": matches["held_out_loss"]}
    found = {name: number(next(filter(None, match.groups()))) for name, match in matches.items() if match}
    for pattern, in_second in SECONDS if "loss" in matches else ():
        match = re.search(pattern, text)
        if match and (duration := number(next(filter(None, match.groups())))):
            found["steps_per_second"] = in_second / duration
    return found


def step_in(text: str, values: Values, epoch: re.Match[str] | None) -> re.Match[str] | None:
    """The match of the step in a line; None: no step. values: the other values in the line."""
    if step := re.search(GLOBAL, text):
        return step
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
    if "=" in match[0] and match["steps"] and text[: match.start()].endswith("["):
        return True
    if word.startswith("batch"):
        return has_value and bool(match["steps"] or re.search(EPOCH, text))
    if word in ("steps", "iters", "iterations", "updates"):
        return "loss" in values and not re.search(SETTINGS, text[: match.start()])
    return has_value or match[0].strip() == (text.strip() if match["steps"] else text.rstrip())


def is_evaluation(text: str, match: re.Match[str]) -> bool:
    """Whether a word shortly before the match shows that the value is not from the training."""
    return bool(re.search(NOT_TRAINING, text[max(0, match.start() - 24) : match.start() + 1]))


class Steps:
    """Counts the steps of an attempt, also if the training counts from 0 or 1 in each epoch.

    A step belongs to the next epoch if it is at most half of the previous step, or lower than it when the epoch is
    another or a progress bar ended there. Without the number of steps of an epoch, the steps of later epochs are
    unknown, as are those of an epoch whose first epoch (0 or 1) is unknown. Lines of a lower priority than an earlier
    line do not count, nor do progress bars with fewer steps, which usually show an evaluation.
    """

    def __init__(self, first_epoch: float | None) -> None:
        """first_epoch: 0 or 1, if known from an earlier attempt."""
        self._first_epoch = first_epoch
        self._priority, self._last, self._total, self._offset = -1, 0.0, math.nan, 0.0
        self._epoch = math.nan  # of the newest line with a step
        self._heading = math.nan  # a line such as "Epoch 1/10" without values precedes the lines of each epoch
        # Whether a line's epoch is used as its step if it has no step. False after a line with a fraction of an epoch.
        self._counts_epochs = True

    def resolve(self, values: Values, priority: int) -> Values:
        """Replace step and steps by those of the whole training. The result is empty if the line does not count."""
        epoch, epochs = values.get("epoch", math.nan), values.get("epochs", math.nan)
        step, steps = values.get("step", math.nan), values.get("steps", math.nan)
        is_whole = "whole" in values
        values = {name: value for name, value in values.items() if name not in ("step", "steps", "epochs", "whole")}
        self._counts_epochs &= math.isnan(epoch) or epoch.is_integer()
        if epoch.is_integer() and epoch <= 1 and self._first_epoch is None:
            self._first_epoch = epoch
        if not priority and epoch.is_integer() and self._counts_epochs:
            if len(values) > 1:
                step, steps, epoch = epoch, epochs, math.nan
            elif epochs >= epoch:
                self._heading = epoch
        is_shorter = priority < 3 and steps < self._total
        if math.isnan(step) or priority < self._priority or (priority == self._priority and is_shorter):
            return {} if priority else values
        if priority > self._priority:
            self._last = self._offset = 0.0
        if priority and math.isnan(epoch) and not math.isnan(self._heading):
            values["epoch"] = epoch = self._heading
        total = steps
        if is_whole:
            self._offset = 0.0
        elif epoch.is_integer() and step <= steps:
            self._offset = math.nan if self._first_epoch is None else (epoch - self._first_epoch) * steps
            total = epochs * steps if self._first_epoch else math.nan  # some programs that count from 0 print the last
        else:
            self._offset += self._length_of_ended_epoch(step, steps, epoch)
            total = math.nan if self._offset or not (priority or self._first_epoch) else steps
        self._priority, self._last, self._total, self._epoch = priority, step, steps, epoch
        counts = {"step": self._offset + step, "steps": total}
        return values | {name: int(count) for name, count in counts.items() if counts["step"] <= count < STEP_LIMIT}

    def _length_of_ended_epoch(self, step: float, steps: float, epoch: float) -> float:
        """The number of steps of the previous epoch if it ended before this step, otherwise 0; NaN if it is unknown."""
        ended = self._last >= self._total or epoch > self._epoch
        if step < self._last and (step <= self._last / 2 or ended):
            return steps if steps == self._total else math.nan
        return 0.0


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
            epoch = parse_json(file.readline())["epoch"]
            first_epoch = epoch if epoch in (0, 1) else None
        self._steps = Steps(first_epoch)
        self._step: int | None = None  # the newest one, for lines without a step
        self._held_out = math.nan  # the newest held-out loss
        self._after_bar, self._loose = True, Values()  # values that wait for the next progress bar, or the first step
        self._rows: list[str] = []  # of a table that has not ended

    def feed(self, lines: bytes) -> None:
        """Take complete lines of the output of all ranks."""
        self._unread += lines
        del self._unread[:-BACKLOG]

    def read(self, last: bool = False) -> None:
        """Append the newest values if an entry is due. last: the output has ended."""
        now = time.monotonic()
        if not last and (not self._unread or now < self._due):
            return
        records: list[Values] = []
        with suppress(Exception), time_limit(MOST_TIME):  # a guess must not end the run
            records = [] if os.path.exists(self._metrics) else self._newest_values(last)
        self._unread.clear()
        lines = [
            json.dumps({"time": time.time()} | {name: finite_or_none(value) for name, value in values.items()}) + "\n"
            for values in records
        ]
        with suppress(OSError):  # nor a failed write
            if lines:
                with open(self._file, "ab", buffering=0, opener=regular_file) as file:
                    file.write("".join(lines).encode())
        ended = time.monotonic()
        interval = min(MAX_INTERVAL, max(MIN_INTERVAL, (ended - self._started) / ENTRIES))
        self._due = ended + min(LONGEST_PAUSE, max(interval, (ended - now) / COST))

    def _newest_values(self, last: bool) -> list[Values]:
        """The newest values and their steps: one record for each step. last: the output has ended.

        Values in a line without a step belong to the previous step. After a progress bar, they belong to the next one:
        tqdm draws the bar again after each line that is written through it.
        """
        lines = bytes(self._unread).split(b"\n")
        lines = [line for line in lines if self._hint.search(line) and rank_of(line) in self._ranks]
        if len(lines) > MOST_LINES:
            self._step, self._loose = None, {}  # the lines between are not read
            self._rows.clear()
        records: dict[int | None, Values] = {}
        for found in map(self._parse, self._texts(lines[-MOST_LINES:], last)):
            values = self._steps.resolve(*found) if found else {}
            if values.get("held_out_loss") == self._held_out:
                del values["held_out_loss"]  # a progress bar may show the loss of an earlier evaluation
            self._held_out = values.get("held_out_loss", self._held_out)
            if found and values and (found[1] or "step" in values):
                self._step = int(values["step"]) if "step" in values else None
                values, self._loose = self._loose | values, {}
                self._after_bar = found[1] in (1, 3)
            elif self._after_bar and (self._step is not None or "epoch" in values):
                self._loose |= values
                continue
            if values:
                records.setdefault(self._step, {}).update(values)
        if self._loose and (last or self._step is None):
            records.setdefault(self._step, {}).update(self._loose)
            self._loose = {}
        newest, known = [], set[str]()
        for step, values in reversed(records.items()):
            if (step is not None or "epoch" in values) and values.keys() - known:
                newest.append(values if step is None else {"step": step} | values)
                known |= values.keys()
        return newest[::-1]

    def _texts(self, lines: list[bytes], last: bool) -> Iterator[str]:
        """The text of each line. The rows of a table become one text, when the table has ended."""
        for text in map(plain, lines):
            if row := re.fullmatch(ROW, text):
                self._rows = [*self._rows[1 - MOST_LINES :], f"{row[1]}: {row[2]}"]
                continue
            yield ", ".join(self._rows)
            self._rows.clear()
            yield text
        if last:
            yield ", ".join(self._rows)

    def _parse(self, text: str) -> Found | None:
        if not self._expression:
            return parse(text)
        match = self._expression.search(text)
        groups = match.groupdict("") if match else {}
        found = {name: number(value) for name, value in groups.items() if re.fullmatch(NUMBER, value, re.IGNORECASE)}
        return (found, 3 * ("step" in found)) if found else None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after this CPU time, also in the middle of a match: Python's re checks for signals."""

    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def plain(line: bytes) -> str:
    """The text of a line, or of the first line of an update, without prefix, colours and other control characters."""
    text = line.partition(b"] ")[2].partition(b"\v")[0]
    return re.sub(CONTROL, "", text.decode(errors="replace").rstrip("\r")[:LONGEST])
