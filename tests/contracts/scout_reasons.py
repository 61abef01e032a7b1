"""The reasons of a scout, read from the texts of records, old and new."""

import re
from collections.abc import Mapping

from hdet.lr_search.reasons import _OLD_TEXTS, Reason, describe

_NEW = {describe([reason]): reason for reason in Reason}
_OLD = {
    **{text: reason for reason, text in _OLD_TEXTS.items()},
    "no reason to leave what was given": Reason.GIVEN_IS_NOT_HOPELESS,
    "what was found, for the batch of all replicas and the schedule": Reason.FOUND,
    "what was found in so few steps is too near to where scores explode": Reason.ROUNDS_TOO_SHORT,
}
"""The texts that the frozen records hold, and those that old states can hold."""
_DECLINED = re.compile(
    r"(?:the given learning rate is kept: )?(\S+) times it is (?:no reason to change it|"
    r"not far enough off)"
)


def members_of(text: str, *, old: bool) -> list[str]:
    """The names of the reasons in a text, in order; with the factor that was declined.

    Raises:
        ValueError: A part of the text belongs to no reason.
    """
    declined = _DECLINED.fullmatch(text)
    if declined:
        return [Reason.GIVEN_IS_KEPT.name, declined[1]]
    return _split(text, _OLD if old else _NEW)


def _split(text: str, table: Mapping[str, Reason]) -> list[str]:
    """The members of a text. Some texts have a comma themselves, so they are tried one by one."""
    found = []
    while text:
        starts = [known for known in table if text == known or text.startswith(f"{known}, ")]
        if not starts:
            raise ValueError(f"no reason has the text {text!r}")
        longest = max(starts, key=len)
        found.append(table[longest].name)
        text = text[len(longest) :].removeprefix(", ")
    return found
