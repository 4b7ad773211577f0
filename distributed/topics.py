"""The embedded text: topics of the Python language reference, by domain, and none of it twice.

Standard library only: who starts jobs needs the names of the domains, and not PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# The topics of the language reference by domain. Those that only repeat a longer one (see without_repetitions) stand
# here too: which of two is the longer may change from one Python to the next.
TOPICS = {
    "special-methods": """
        specialnames customization attribute-access sequence-types numeric-types callable-types
        context-managers""",
    "compound-statements": """
        compound if else for while try with function class async""",
    "simple-statements": """
        assignment augassign import raise assert del global nonlocal return yield pass break continue""",
    "expressions": """
        comparisons operator-summary calls binary unary power shifting bitwise booleans in lambda await
        subscriptions slicings dict lists exprlists attribute-references atom-identifiers atom-literals
        conversions assignment-expressions""",
    "types": """
        types objects specialattrs typesmodules typesmethods typesfunctions bltin-code-objects
        bltin-type-objects bltin-null-object bltin-ellipsis-object""",
    "containers": """
        typesseq typesseq-mutable typesmapping truth""",
    "strings": """
        strings string-methods formatstrings""",
    "execution": """
        execmodel naming dynamic-features exceptions debugger identifiers id-classes numbers integers floating
        imaginary""",
}
DOMAINS = tuple(TOPICS)
OTHER = "execution"  # where the topics go that are not in the table, of Pythons newer than it


def without_repetitions(topics: Mapping[str, str]) -> dict[str, str]:
    """The topics without what they repeat.

    A fifth of the reference stands in it twice: "try" and "with" are chapters of "compound", word for word.
    Held-out text that is trained on elsewhere would be no held-out text. So a paragraph belongs to the
    longest topic that says it, and a topic with less than half of its text left is left out.
    """
    seen: set[str] = set()
    longest_first = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
    left = {topic: "\n\n".join(_new_paragraphs(topics[topic], seen)) for topic in longest_first}
    return {topic: text for topic, text in left.items() if 2 * len(text) >= len(topics[topic])}


def _new_paragraphs(text: str, seen: set[str]) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words not in seen:
            seen.add(words)
            yield paragraph


def by_domain(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """The texts of each domain, in the order of the table; unknown topics, by name, at the end of OTHER."""
    table = {domain: names.split() for domain, names in TOPICS.items()}
    table[OTHER] += sorted(set(topics).difference(*table.values()))
    return {domain: [topics[name] for name in names if name in topics] for domain, names in table.items()}
