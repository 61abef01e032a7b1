"""Numbers as the demo shows them."""


def number(value: float | None) -> str:
    """A number that is short enough for a table.

    >>> number(0.03), number(None), number(1.5e-5), number(50), number(1e30)
    ('0.0300', '-', '1.5e-05', '50', '1e+30')
    """
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}" if 10 <= abs(value) < 1e5 else f"{value:.3g}"


def ratio(value: float) -> str:
    """A factor with three digits.

    >>> ratio(1253.7), ratio(0.00123)
    ('1,250', '0.00123')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.9715)
    '97.2 %'
    """
    return f"{100 * share:.1f} %"


def remaining(seconds: float | None) -> str:
    """The time that is left, as text.

    >>> remaining(75), remaining(None)
    ('1:15 left', 'estimating')
    """
    if seconds is None:
        return "estimating"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
    return f"{clock} left"
