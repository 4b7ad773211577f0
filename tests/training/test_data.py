"""Training data: held-out text is not trained on, each epoch has every window once, and a resumed run continues.

No loss curve shows these faults: held-out text that is trained on, an epoch that drops its last windows, two ranks
with the same windows, a resume that restarts the epoch, a loader that uses the global random state.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.training import data
from distributed.training.data import (
    Corpus,
    DataError,
    MixedStream,
    Mixture,
    Stream,
    Tokens,
    Windows,
    decode,
    held_out_batches,
    loader,
    permutation,
    read_reference,
    split,
)
from distributed.training.preemption import STOP_SIGNALS
from distributed.training.settings import Data
from distributed.training.topics import DOMAINS, OTHER, TOPICS, by_domain, without_repetitions

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core


ROOT = Path(__file__).parents[2]
REFERENCE = {domain: "\n\n\n".join(texts) for domain, texts in read_reference().items()}


def counted(count: int) -> Tokens:
    """Tokens 0, 1, 2, ... so that a window shows its position."""
    return Tokens(torch.arange(count, dtype=torch.int32).to(torch.uint16), "counted", 65536)


def write_bin(file: Path, ids: list[int]) -> Path:
    file.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return file


def load(path: Path | None = None, *, mixed: bool = False, vocab_size: int | None = None, **chosen: Any) -> Corpus:
    return data.load(Data(path=path, **chosen), mixed, vocab_size)


@cache
def embedded(*domains: str) -> Corpus:
    return load(domains=domains or None)


def text_of(tokens: Tokens) -> bytes:
    return bytes(tokens.ids.tolist())


# ---------------------------------------------------------------- Python's language reference


def test_the_embedded_text_is_the_language_reference_in_domains_of_similar_sizes() -> None:
    corpus = load()
    sizes = {domain: len(REFERENCE[domain].encode()) for domain in DOMAINS}
    assert corpus.kind == "bytes"
    assert corpus.vocab_size == 256
    assert corpus.domains == DOMAINS
    assert len(corpus.train) + len(corpus.held_out) > 300_000
    assert 0.09 < len(corpus.held_out) / len(corpus.train) < 0.12
    assert max(sizes.values()) < 5 * min(sizes.values()), sizes
    assert "comprehension" in decode(corpus.train.ids)


def test_no_paragraph_of_the_embedded_text_is_duplicated() -> None:
    paragraphs = Counter(
        " ".join(paragraph.split())
        for domain in DOMAINS
        for paragraph in REFERENCE[domain].split("\n\n")
        if paragraph.strip()
    )
    assert [paragraph for paragraph, times in paragraphs.items() if times > 1] == []


def test_a_paragraph_of_two_topics_is_kept_in_the_longer_one() -> None:
    long = "Compound\n\nThe if statement.\n\nThe try statement.\n\nThe end."
    topics = {
        "try": "Try\n\nThe try statement.",
        "compound": long,
        "pass": "Nothing  happens.\n\nNothing happens.\n\nYet.",
    }
    assert without_repetitions(topics) == {"compound": long, "pass": "Nothing  happens.\n\nYet."}


def test_every_topic_is_in_one_domain() -> None:
    names = " ".join(TOPICS.values()).split()
    texts = {name: name for name in names}
    assert len(names) == len(set(names))
    assert sorted(chain.from_iterable(by_domain(texts).values())) == sorted(names)


def test_every_topic_of_a_python_before_3_14_is_listed_in_a_domain() -> None:
    from pydoc_data.topics import topics

    unknown = set(topics) - set(" ".join(TOPICS.values()).split())
    assert sys.version_info >= (3, 14) or not unknown


def test_topics_of_a_newer_python_go_to_the_default_domain() -> None:
    placed = by_domain({"zebra": "Z", "pass": "P", "execmodel": "E", "aardvark": "A"})
    assert placed[OTHER] == ["E", "A", "Z"]
    assert placed["simple-statements"] == ["P"]


@settings(max_examples=20, deadline=None)
@given(chosen=st.sets(st.sampled_from(DOMAINS), min_size=1))
def test_the_same_bytes_are_held_out_whatever_domains_are_chosen(chosen: set[str]) -> None:
    corpus, alone = load(domains=sorted(chosen)), [embedded(name) for name in DOMAINS if name in chosen]
    assert text_of(corpus.train) == b"\n\n\n".join(text_of(one.train) for one in alone)
    assert text_of(corpus.held_out) == b"\n\n\n".join(text_of(one.held_out) for one in alone)


def test_the_order_in_which_domains_are_named_changes_nothing() -> None:
    first, second = load(domains=["strings", "types"]), load(domains=["types", "strings"])
    assert torch.equal(first.train.ids, second.train.ids)


TEXTS = {"a": b"A" * 40, "b": b"B" * 40, "c": b"C" * 40}


def write_texts(directory: Path) -> Path:
    for name, text in TEXTS.items():
        (directory / f"{name}.txt").write_bytes(text)
    return directory


def letters(tokens: Tokens | None) -> dict[str, int]:
    return {} if tokens is None else Counter(text_of(tokens).decode().replace("\n", ""))


@pytest.mark.parametrize(
    ("mode", "arguments", "trained", "held_out", "base"),
    [
        ("heldout", {"participant": "b"}, {"A": 40, "C": 40}, {"B": 40}, {}),
        ("single", {"participant": "b"}, {"B": 30}, {"B": 10}, {}),
        ("pooled", {"participant": "b"}, {"A": 30, "B": 30, "C": 30}, {"B": 10}, {}),
        ("base_only", {}, {"A": 30, "B": 30, "C": 30}, {"A": 10, "B": 10, "C": 10}, {}),
        ("base_only", {"participant": "b"}, {"A": 30, "C": 30}, {"A": 10, "C": 10}, {}),
        ("base_only", {"domains": ["b", "c"], "participant": "b"}, {"C": 30}, {"C": 10}, {}),
        ("base_only", {"base_participants": ["c", "b"]}, {"B": 30, "C": 30}, {"B": 10, "C": 10}, {}),
        ("base_only", {"base_participants": ["a"], "participant": "b"}, {"A": 30}, {"A": 10}, {}),
        ("full_fine_tuning", {"participant": "b"}, {"B": 30}, {"B": 10}, {}),
        ("full_fine_tuning", {"participant": "b", "target_data_pct": 0.5}, {"B": 15}, {"B": 10}, {}),
        ("full_fine_tuning", {"participant": "b", "base_participants": ["not here"]}, {"B": 30}, {"B": 10}, {}),
        ("full_fine_tuning", {"participant": "b", "mixed": True}, {"B": 30}, {"B": 10}, {"A": 30, "C": 30}),
        ("full_fine_tuning", {"participant": "b", "base_participants": ["a", "b"], "mixed": True}, {"B": 30},
         {"B": 10}, {"A": 30}),
        ("from_scratch",
         {"participant": "b", "domains": ["b", "c"], "base_participants": ["a"], "mixed": True, "target_data_pct": 0.1},
         {"B": 3}, {"B": 10}, {"A": 30}),
    ],
)  # fmt: skip
def test_the_mode_selects_the_text_of_target_and_base_and_what_is_held_out(
    mode: str,
    arguments: dict[str, Any],
    trained: dict[str, int],
    held_out: dict[str, int],
    base: dict[str, int],
    tmp_path: Path,
) -> None:
    corpus = load(write_texts(tmp_path), mode=mode, held_out=0.25, **arguments)
    assert (letters(corpus.train), letters(corpus.held_out), letters(corpus.base)) == (trained, held_out, base)


@pytest.mark.parametrize(("mode", "domains"), [("heldout", "a, b, c"), ("single", "b"), ("pooled", "a, b, c")])
def test_a_corpus_is_printed_with_its_domains(mode: str, domains: str, tmp_path: Path) -> None:
    corpus = load(write_texts(tmp_path), participant="b", mode=mode)
    assert str(corpus).endswith(f"; domains {domains}; participant b, mode {mode}")


@pytest.mark.parametrize("mode", ["full_fine_tuning", "from_scratch"])
def test_the_base_model_of_a_participant_trains_on_the_text_that_is_mixed_into_its_fine_tuning(mode: str) -> None:
    base = load(mode="base_only", participant="types")
    tuned = load(mode=mode, participant="types", mixed=True)
    assert tuned.base is not None
    assert text_of(base.train) == text_of(tuned.base)
    trained = {" ".join(part.decode().split()) for part in text_of(base.train).split(b"\n\n")} - {""}
    assert not trained & {" ".join(part.split()) for part in REFERENCE["types"].split("\n\n")}
    assert text_of(tuned.held_out) == text_of(load(participant="types", mode="single").held_out)
    assert str(base).endswith("participant types, mode base_only")
    assert f"held out, {len(base.train):,} of the base's participants; domains special-methods" in str(tuned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "base_only", "domains": ["b"], "participant": "b"}, "there is no domain but b to train the base on"),
        ({"mode": "from_scratch", "domains": ["b"], "participant": "b", "mixed": True},
         "there is no domain but b to t"),
        ({"mode": "from_scratch", "participant": "b", "base_participants": ["b"], "mixed": True},
         "there is no domain but b to train the base on"),
        ({"mode": "base_only", "base_participants": ["x"]}, "data.base_participants: no domain 'x'"),
        ({"mode": "base_only", "participant": "x"}, "data.participant: no domain 'x'"),
        ({"mode": "from_scratch", "participant": "x", "base_participants": ["a"]}, "data.participant: no domain 'x'"),
    ],
)  # fmt: skip
def test_invalid_base_or_target_participants_are_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(write_texts(tmp_path), **arguments)


def test_a_target_data_pct_too_small_for_a_window_is_refused(tmp_path: Path) -> None:
    corpus = load(write_texts(tmp_path), mode="from_scratch", participant="a", target_data_pct=0.1)
    with pytest.raises(
        DataError, match=r"first 0.1 of the training text of a has 4 tokens, .*raise data.target_data_pct"
    ):
        Windows(corpus.train, 8)


@pytest.mark.parametrize("participant", DOMAINS)
def test_a_held_out_domain_is_not_in_the_training_text(participant: str) -> None:
    corpus, paragraphs = load(participant=participant), REFERENCE[participant].encode().split(b"\n\n")
    assert text_of(corpus.held_out) == REFERENCE[participant].encode()
    assert len(corpus.train) > 0.7 * len(load().train)
    trained = {" ".join(paragraph.decode().split()) for paragraph in text_of(corpus.train).split(b"\n\n")} - {""}
    assert not [paragraph for paragraph in paragraphs if " ".join(paragraph.decode().split()) in trained]


def test_participants_of_a_directory_are_files_and_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "s1/more").mkdir(parents=True)
    for name in ("s1/x.txt", "s1/more/y.md", "s2.txt", "s3.txt"):
        (tmp_path / name).write_text(name * 4)
    (tmp_path / "s1/empty").touch()
    corpus = load(tmp_path, domains=["s2", "s1"], participant="s2")
    assert text_of(corpus.train) == b"s1/more/y.md" * 4 + b"\n\n\n" + b"s1/x.txt" * 4
    assert text_of(corpus.held_out) == b"s2.txt" * 4
    assert (corpus.domains, corpus.skipped) == (("s1", "s2"), 1)


@given(data=st.binary(max_size=300), share=st.floats(0.001, 0.999))
def test_a_split_loses_no_byte_and_holds_out_the_end(data: bytes, share: float) -> None:
    trained, held_out = split(data, share)
    assert trained + held_out == data
    assert len(held_out) == int(len(data) * share)


# ---------------------------------------------------------------- text and token files


def test_the_end_of_a_text_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "poem.txt"
    file.write_text("abcdefghij" * 10)
    corpus = load(file, held_out=0.25)
    assert text_of(corpus.train) == b"abcdefghij" * 7 + b"abcde"
    assert text_of(corpus.held_out) == b"fghij" + b"abcdefghij" * 2


def test_a_directory_is_read_in_name_order_and_the_end_of_each_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "c.txt": b"cccC",
        "b/two words; $(x)": b"bbbB",
        "a.md": b"aaaA",
        ".hidden": b"no",
        ".git/config": b"no",
        "image.png": b"\x89PNG\0no",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")  # reading it would block
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    corpus = load(tmp_path, held_out=0.25)
    assert text_of(corpus.train) == b"aaa\n\n\nbbb\n\n\nccc"
    assert text_of(corpus.held_out) == b"A\n\n\nB\n\n\nC"
    assert corpus.skipped == 6
    assert str(corpus).endswith("skipped what is hidden, binary or empty: 6")


def test_a_hidden_file_named_explicitly_is_read(tmp_path: Path) -> None:
    (tmp_path / ".notes").write_text("abcd")
    assert text_of(load(tmp_path / ".notes", held_out=0.25).train) == b"abc"


def test_bytes_that_are_no_utf8_are_trained_on_and_shown_with_a_replacement(tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9 " * 4)
    corpus = load(file, held_out=0.5)
    assert text_of(corpus.train) == b"caf\xe9 " * 2
    assert decode(corpus.train.ids[:4]) == "caf\N{REPLACEMENT CHARACTER}"


def test_an_id_of_a_padded_vocabulary_decodes_to_a_replacement() -> None:
    assert decode(torch.tensor([72, 105, 300])) == "Hi\N{REPLACEMENT CHARACTER}"


@given(ids=st.lists(st.integers(0, 65535), min_size=20, max_size=60))
def test_a_token_file_is_loaded_unchanged(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    corpus = load(write_bin(tmp_path_factory.mktemp("bin") / "tokens.bin", ids), vocab_size=65536)
    held_out = int(len(ids) * 0.1)
    assert corpus.train.ids.tolist() == ids[: len(ids) - held_out]
    assert corpus.held_out.ids.tolist() == ids[len(ids) - held_out :]


def test_a_directory_with_train_and_val_holds_out_val(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", [1, 2, 3, 4])
    write_bin(tmp_path / "val.bin", [5, 6])
    (tmp_path / "input.txt").write_text("what the tokens were made of")
    corpus = load(tmp_path, vocab_size=10)
    assert corpus.kind == "tokens"
    assert corpus.train.ids.tolist() == [1, 2, 3, 4]
    assert corpus.held_out.ids.tolist() == [5, 6]


def test_a_token_file_is_mapped_not_read(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    with file.open("wb") as opened:
        opened.truncate(2 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    windows = Windows(load(file, vocab_size=50257).train, 1024)
    inputs, _ = windows[[0, len(windows) - 1]]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert inputs.shape == (2, 1024)
    assert grown < 200_000


def test_a_mapped_file_is_pickled_as_its_path(tmp_path: Path) -> None:
    windows = Windows(load(write_bin(tmp_path / "t.bin", list(range(50_000))), vocab_size=50_000).held_out, 100)
    pickled = pickle.dumps(windows)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[[3]][0], windows[[3]][0])


def test_a_token_outside_the_vocabulary_is_named_with_file_value_and_position(tmp_path: Path) -> None:
    ids = [7] * 200
    ids[195] = 99
    corpus = load(write_bin(tmp_path / "train.bin", ids), vocab_size=99)
    assert len(Windows(corpus.train, 10)[[0, 16]][0]) == 2
    with pytest.raises(DataError, match=r"train\.bin: token 99 at position 195, but model\.vocab_size=99: set it"):
        Windows(corpus.held_out, 5)[[1, 2]]


# ---------------------------------------------------------------- windows


@given(count=st.integers(2, 200), block=st.integers(1, 50))
def test_windows_are_adjacent_and_targets_are_shifted_by_one_token(count: int, block: int) -> None:
    if count <= block:
        with pytest.raises(DataError, match="too few for one window"):
            Windows(counted(count), block)
        return
    windows = Windows(counted(count), block)
    inputs, targets = windows[torch.arange(len(windows))]
    assert inputs.dtype == targets.dtype == torch.long
    assert inputs.shape == targets.shape == (len(windows), block)
    assert inputs.flatten().tolist() == list(range(len(windows) * block))
    assert torch.equal(targets, inputs + 1)
    assert 0 <= count - 1 - len(windows) * block < block


def test_a_batch_has_the_requested_windows_in_order() -> None:
    windows = Windows(counted(50), 10)
    inputs, targets = windows[[3, 1]]
    assert inputs[:, 0].tolist() == [30, 10]
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


# ---------------------------------------------------------------- the stream

LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))  # ranks, micro-batch size, micro-batches


def windows_of_steps(windows: int, batch: int, steps: int, ranks: int = 1, micro: int = 1, **more: int) -> list[int]:
    """Return the windows of `steps` steps. In each step, all windows of rank 0 precede those of rank 1, and so on."""
    streams = [iter(Stream(windows, batch, rank=r, size=ranks, micro=micro, **more)) for r in range(ranks)]
    micro_batches = batch // ranks // micro
    return [
        window
        for _ in range(steps)
        for stream in streams
        for piece in islice(stream, micro_batches)
        for window in piece
    ]


@given(windows=st.integers(1, 40), layout=LAYOUTS, seed=st.integers(0, 2**40))
def test_every_epoch_shows_every_window_exactly_once(windows: int, layout: tuple[int, int, int], seed: int) -> None:
    ranks, micro, micro_batches = layout
    batch = ranks * micro * micro_batches  # often greater than the windows of an epoch
    shown = windows_of_steps(windows, batch, -(-3 * windows // batch), ranks, micro, seed=seed)
    for epoch in range(3):
        assert sorted(shown[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(windows=st.integers(1, 40), layout=LAYOUTS, start=st.integers(0, 150), seed=st.integers(0, 9))
def test_many_ranks_together_see_the_same_global_batches_as_a_single_rank(
    windows: int, layout: tuple[int, int, int], start: int, seed: int
) -> None:
    ranks, micro, micro_batches = layout
    batch = ranks * micro * micro_batches
    together = windows_of_steps(windows, batch, 5, ranks, micro, seed=seed, start=start)
    assert together == windows_of_steps(windows, batch, 5, seed=seed, start=start)


@given(windows=st.integers(1, 40), start=st.integers(0, 200), old_batch=st.integers(1, 7), layout=LAYOUTS)
def test_a_resumed_stream_continues_also_with_another_world_size(
    windows: int, start: int, old_batch: int, layout: tuple[int, int, int]
) -> None:
    ranks, micro, micro_batches = layout
    batch = ranks * micro * micro_batches
    unbroken = windows_of_steps(windows, old_batch, -(-(start + 3 * batch) // old_batch), seed=5)
    resumed = windows_of_steps(windows, batch, 3, ranks, micro, seed=5, start=start)
    assert resumed == unbroken[start : start + 3 * batch]


def test_each_micro_batch_has_its_size_and_each_rank_its_own_windows() -> None:
    micro_batches = [list(islice(Stream(100, 12, rank=rank, size=2, micro=3), 2)) for rank in range(2)]
    assert [[len(piece) for piece in of_rank] for of_rank in micro_batches] == [[3, 3], [3, 3]]
    assert len({window for of_rank in micro_batches for piece in of_rank for window in piece}) == 12


def mixed_windows_of_steps(
    target: int, base: int, of_target: int, batch: int, steps: int, ranks: int = 1, micro: int = 1, start: int = 0
) -> list[list[int]]:
    """Return the windows of each of `steps` global batches. of_target: how many windows of a batch are the target's."""
    windows = Mixture(Windows(counted(target + 1), 1), Windows(counted(base + 1), 1))
    streams = [
        iter(MixedStream(windows, batch, of_target, seed=7, start=start, rank=rank, size=ranks, micro=micro))
        for rank in range(ranks)
    ]
    micro_batches = batch // ranks // micro
    return [[w for stream in streams for piece in islice(stream, micro_batches) for w in piece] for _ in range(steps)]


MIXED = LAYOUTS.filter(lambda layout: layout[0] * layout[1] * layout[2] > 1)


@given(target=st.integers(1, 20), base=st.integers(1, 20), layout=MIXED, start=st.integers(0, 9), data=st.data())
def test_each_global_batch_mixes_the_same_windows_on_any_number_of_ranks_and_after_a_resume(
    target: int, base: int, layout: tuple[int, int, int], start: int, data: st.DataObject
) -> None:
    ranks, micro, micro_batches = layout
    batch = ranks * micro * micro_batches
    of_target = data.draw(st.integers(1, batch - 1))
    unbroken = mixed_windows_of_steps(target, base, of_target, batch, start + 3)
    for step, windows in enumerate(unbroken):
        of_base = [window - target for window in windows if window >= target]
        assert [window for window in windows if window < target] == windows_of_steps(
            target, of_target, 1, seed=7, start=step * of_target
        )
        assert of_base == windows_of_steps(base, batch - of_target, 1, seed=7, start=step * (batch - of_target))
    resumed = mixed_windows_of_steps(target, base, of_target, batch, 3, ranks, micro, start=start * batch)
    assert resumed == unbroken[start:]


def test_a_mixture_numbers_the_windows_of_the_base_after_those_of_the_target() -> None:
    windows = Mixture(Windows(counted(11), 2), Windows(counted(7), 2))  # 5 windows, then 3
    assert len(windows) == 8
    inputs, targets = windows[[6, 1, 5, 4]]
    assert inputs.tolist() == [[2, 3], [8, 9], [2, 3], [0, 1]], "windows of the target come first"
    assert targets.tolist() == [[3, 4], [9, 10], [3, 4], [1, 2]]
    assert windows[[4]][0].tolist() == [[8, 9]]
    assert windows[[5]][0].tolist() == [[0, 1]]


def test_each_epoch_and_seed_has_a_different_order() -> None:
    orders = [tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    assert windows_of_steps(50, 50, 3, seed=3) == [*orders[12], *orders[13], *orders[14]]


@pytest.mark.parametrize(
    "invalid",
    [{"windows": 0}, {"batch": 0}, {"micro": 0}, {"start": -1}, {"rank": 2}, {"rank": -1}, {"size": 0}, {"batch": 7},
     {"micro": 3}],
)  # fmt: skip
def test_a_stream_with_invalid_sizes_is_refused(invalid: dict[str, int]) -> None:
    valid = {"windows": 10, "batch": 8, "rank": 1, "size": 2, "micro": 2, "start": 0}
    Stream(**valid)
    with pytest.raises(ValueError, match=next(iter(invalid)) + "="):
        Stream(**{**valid, **invalid})


@given(windows=st.integers(1, 60), batch=st.integers(1, 9), size=st.integers(1, 5))
def test_each_held_out_window_counts_once_and_all_ranks_have_the_same_number_of_batches(
    windows: int, batch: int, size: int
) -> None:
    ranks = [list(held_out_batches(windows, batch, rank, size)) for rank in range(size)]
    weight: Counter[int] = Counter()
    for indices, weights in (pair for of_rank in ranks for pair in of_rank):
        assert indices.shape == weights.shape == (batch,)
        for window, counts in zip(indices.tolist(), weights.tolist(), strict=True):
            weight[window] += counts
    assert weight == dict.fromkeys(range(windows), 1.0)
    assert {len(of_rank) for of_rank in ranks} == {-(-windows // (batch * size))}


def test_held_out_windows_that_do_not_fill_a_batch_on_each_rank_are_divided_evenly_among_the_ranks() -> None:
    loads = [sum(w.sum().item() for _, w in held_out_batches(18, 4, rank, 3)) for rank in range(3)]
    assert loads == [6, 6, 6]


# ---------------------------------------------------------------- the loader


def first_batches(workers: int, count: int = 12) -> list[torch.Tensor]:
    windows = Windows(load(domains=["strings"]).train, 64)
    return [torch.cat(pair) for pair in islice(loader(windows, Stream(len(windows), 8), workers=workers), count)]


def test_workers_return_the_same_batches_in_the_same_order() -> None:
    in_trainer, in_workers = first_batches(workers=0), first_batches(workers=2)
    assert len(in_trainer) == len(in_workers) == 12
    assert all(torch.equal(one, other) for one, other in zip(in_trainer, in_workers, strict=True))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    first_batches(workers=0)
    first_batches(workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_in_a_worker_is_raised_in_the_trainer(tmp_path: Path) -> None:
    corpus = load(write_bin(tmp_path / "t.bin", [50] * 100), vocab_size=50)
    windows = Windows(corpus.train, 10)
    with pytest.raises(DataError, match="token 50 at position"):
        next(iter(loader(windows, Stream(len(windows), 2), workers=1)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])  # Python's defaults before and since 3.14
def test_a_worker_ignores_stop_signals(method: str) -> None:
    others = set(multiprocessing.active_children())
    windows = Windows(counted(1000), 10)
    created = loader(windows, Stream(len(windows), 2), workers=1)
    created.multiprocessing_context = method
    batches = iter(created)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    for number in STOP_SIGNALS:
        os.kill(worker.ident or 0, number)
    assert len(list(islice(batches, 20))) == 20  # many more than were read ahead
    assert worker.is_alive()


TRAINER = """
import multiprocessing, sys
from distributed.training.data import Stream, Windows, load, loader
from distributed.training.settings import Data

def train():
    global batches  # referenced until exit, as an object in a traceback is
    windows = Windows(load(Data()).train, 64)
    batches = iter(loader(windows, Stream(len(windows), 8), workers=2))
    next(batches)
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    raise SystemExit(3)

if sys.argv[1] == "trainer":
    train()
agent = multiprocessing.get_context("fork")  # its processes run no atexit functions
trainer = agent.Process(target=train)
trainer.start()
trainer.join()
sys.exit(trainer.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("parent", ["trainer", "trainer of an agent"])
def test_workers_exit_with_the_trainer(parent: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, parent], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120
    )
    workers = done.stdout.split()
    assert done.returncode == 3
    assert len(workers) == 2
    assert not any(Path("/proc", worker).exists() for worker in workers)


# ---------------------------------------------------------------- refusals


def write_zip(file: Path) -> None:
    file.write_bytes(b"PK\0\0")


def write_tokens(file: Path) -> None:
    write_bin(file, [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "make", "loaded", "arguments", "message"),
    [
        ("a.zip", write_zip, "a.zip", {}, r"a\.zip: no text in this file.*\.bin"),
        ("a.zip", write_zip, ".", {}, r"no text among 1 entries.*train\.bin"),
        ("gone.txt", lambda path: path.symlink_to("gone"), ".", {}, r"cannot read .*gone\.txt: No such file"),
        ("train.bin", Path.touch, ".", {"vocab_size": 9}, r"train\.bin is empty: a .bin file is uint16 tokens, two b"),
        ("t.bin", lambda path: path.write_bytes(b"123"), "t.bin", {"vocab_size": 9},
         r"t\.bin has 3 bytes, an odd number: a .bin file is uint16 tokens, two bytes each"),
        ("t.bin", write_tokens, "t.bin", {}, r"t\.bin holds token ids.*set model\.vocab_size"),
        ("t.bin", write_tokens, "t.bin", {"vocab_size": 9, "domains": ["types"]},
         "t.bin: cannot list participants: Not a directory; give "),
        ("a.zip", write_zip, "a.zip", {"participant": "a"},
         "cannot list participants: Not a directory; give a directory"),
    ],
)  # fmt: skip
def test_a_path_without_usable_text_is_refused(
    name: str, make: Callable[[Path], object], loaded: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(DataError, match=message):
        load(tmp_path / loaded, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domains": ["strngs"]}, "no domain 'strngs'; did you mean 'strings'.*There are special-methods, "),
        ({"participant": "strngs"}, "participant: no domain 'strngs'; did you mean 'strings'.*There are special-m"),
        ({"participant": "types", "domains": ["strings"]}, "participant: no domain 'types'; there are strings"),
        ({"participant": "types", "domains": ["types"]}, "there is no domain but types; name more, or use mode single"),
        ({"domains": ["types", "types"]}, "name some, each once"),
        ({"vocab_size": 255}, r"model\.vocab_size=255: text is read as bytes and needs 256"),
    ],
)
def test_invalid_corpus_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(**arguments)


def test_a_held_out_part_too_short_for_a_window_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 100)
    with pytest.raises(DataError, match=r"held-out part of .*short\.txt has 10 tokens, too few .* 16"):
        Windows(load(file).held_out, 16)


def test_a_python_without_the_reference_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"apt-get install python3\), or set data\.path"):
        load()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root privileges temporarily, because root may read any file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_an_unreadable_entry_is_an_error_and_not_skipped(make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # user nobody has no access to tmp_path
        Path(name).chmod(0o755)
        Path(name, "plain.txt").write_text("text")
        secret = Path(name, "secret")
        make(secret)
        secret.chmod(0)
        with unprivileged(), pytest.raises(DataError, match=r"cannot read .*secret: Permission denied"):
            load(Path(name))
