"""Topics of Python's language reference by domain, without repetitions.

Standard library only: the dispatcher of job lists needs the names of the domains without PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# The topics of the language reference by domain. Topics that only repeat a longer one (see without_repetitions) are
# listed too: which of two topics is longer may change between versions of Python.
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
OTHER = "execution"  # domain of topics of newer Python versions, which are not in TOPICS


def without_repetitions(topics: Mapping[str, str]) -> dict[str, str]:
    """Remove paragraphs that several topics share.

    A fifth of the reference appears twice: "try" and "with" are sections of "compound". Without this function, held-out
    text could also be training text. A paragraph stays in the longest topic that contains it; a topic that loses more
    than half of its text is left out.
    """
    seen: set[str] = set()
    longest_first = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
    remaining = {topic: "\n\n".join(_new_paragraphs(topics[topic], seen)) for topic in longest_first}
    return {topic: text for topic, text in remaining.items() if 2 * len(text) >= len(topics[topic])}


def _new_paragraphs(text: str, seen: set[str]) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words not in seen:
            seen.add(words)
            yield paragraph


def by_domain(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the texts of each domain, in the order of TOPICS; other topics are sorted by name at the end of OTHER."""
    table = {domain: names.split() for domain, names in TOPICS.items()}
    table[OTHER] += sorted(set(topics).difference(*table.values()))
    return {domain: [topics[name] for name in names if name in topics] for domain, names in table.items()}
