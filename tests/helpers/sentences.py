"""Texts of findings: all that is said of one, and the rules for its first sentence."""

from __future__ import annotations

from gputrace.model.results import Finding

MOST_WORDS = 25


def words_of(finding: Finding) -> str:
    """The message and the details, as one text."""
    return "; ".join((finding.message, *finding.details))


def check_sentences(finding: Finding) -> Finding:
    """Raise an AssertionError unless the message is one short sentence, the details sentences."""
    message = finding.message
    assert len(message.split()) <= MOST_WORDS, message
    assert not any(mark in message for mark in (";", ". ", "\n")), message
    for text in (message, *finding.details, finding.advice):
        assert text == text.strip(" .,;"), text
    return finding
