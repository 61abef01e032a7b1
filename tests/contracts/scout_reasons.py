"""The reasons of a scout, read from the texts of a record."""

import re

from hdet.lr_search.reasons import Reason, describe

_TEXTS = {describe([reason]): reason for reason in Reason}
_DECLINED = re.compile(r"the given learning rate is kept: (\S+) times it is not far enough off")


def members_of(text: str) -> list[str]:
    """The names of the reasons in a text, in order; with the factor that was declined.

    Some texts have a comma themselves, so they are tried one by one.

    Raises:
        ValueError: A part of the text belongs to no reason.
    """
    if declined := _DECLINED.fullmatch(text):
        return [Reason.GIVEN_IS_KEPT.name, declined[1]]
    found = []
    while text:
        starts = [known for known in _TEXTS if text == known or text.startswith(f"{known}, ")]
        if not starts:
            raise ValueError(f"no reason has the text {text!r}")
        longest = max(starts, key=len)
        found.append(_TEXTS[longest].name)
        text = text[len(longest) :].removeprefix(", ")
    return found
