"""Numbers and strings as charts and reports write them: escaped, and "–" for what is missing."""

import html
import math
import numbers
import re

NONE = "–"
"""What stands for a number that was not measured or is not finite."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def escape(text: object) -> str:
    """Text that is safe in HTML and XML, as content or as an attribute's value.

    Characters that XML cannot hold (control characters, lone surrogates) become U+FFFD.

    Args:
        text: anything; its `str` is used.

    Returns:
        The escaped text.

    >>> escape('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(_NOT_XML.sub("\ufffd", str(text)), quote=True)


def finite(value: object) -> float | None:
    """The value as a float, or None where it is no finite number.

    Args:
        value: anything, for example an entry of metrics.json.

    Returns:
        A finite float, or None for None, NaN, ±∞, booleans and everything that is no number.

    >>> finite(2), finite(float("nan")), finite("2"), finite(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        return None
    return number if math.isfinite(number) else None


def tick_text(value: float) -> str:
    """A tick's label in plain notation.

    >>> tick_text(0.25), tick_text(5000.0)
    ('0.25', '5,000')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def percent_text(value: float) -> str:
    """A tick's label as a percentage.

    >>> percent_text(0.7)
    '70%'
    """
    return f"{100 * value:.4g}%"


def power_text(value: float) -> str:
    """A tick's label as a power of ten, for a logarithmic axis that spans many of them.

    >>> power_text(1e-12)
    '10⁻¹²'
    """
    return "10" + str(round(math.log10(value))).translate(_SUPERSCRIPT)


def fixed(value: object, digits: int = 2) -> str:
    """A number with a fixed count of decimals and thousands separators, "–" if it is none.

    >>> fixed(1234.5, 1), fixed(float("nan"))
    ('1,234.5', '–')
    """
    number = finite(value)
    return NONE if number is None else f"{number:,.{digits}f}"


def percent(value: object) -> str:
    """A share as a percentage with one decimal, "–" if it is no number.

    >>> percent(0.9412)
    '94.1%'
    """
    number = finite(value)
    return NONE if number is None else f"{100 * number:.1f}%"


def size(value: object) -> str:
    """Bytes in KiB, MiB or GiB with three digits or so, "–" if it is no number.

    >>> size(3 * 2**29), size(412 * 2**20)
    ('1.50 GiB', '412 MiB')
    """
    number = finite(value)
    if number is None:
        return NONE
    unit, name = next((p for p in _UNITS if abs(number) >= p[0]), _UNITS[-1])
    scaled = number / unit
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {name}"


def error(value: object) -> str:
    """An error in scientific notation, "0" where it is exactly that, "–" if it is no number.

    >>> error(1.234e-14), error(1e-6), error(0.0)
    ('1.2e-14', '1e-6', '0')
    """
    number = finite(value)
    if number is None:
        return NONE
    return f"{number:.1e}".replace(".0e", "e").replace("e-0", "e-") if number else "0"


def ratio(part: object, whole: object) -> str:
    """part / whole as "0.32×", "–" where either is no number or the whole is 0.

    >>> ratio(1, 4), ratio(1, 0)
    ('0.25×', '–')
    """
    a, b = finite(part), finite(whole)
    return NONE if a is None or not b else f"{a / b:.2f}×"


def change(after: object, before: object) -> str:
    """after − before with its sign, "–" where either is no number.

    >>> change(1.5, 2), change(2, 1.5), change(1.499, 1.5)
    ('−0.50', '+0.50', '±0.00')
    """
    a, b = finite(after), finite(before)
    if a is None or b is None:
        return NONE
    text = f"{a - b:+.2f}".replace("-", "−")
    return "±0.00" if text in ("−0.00", "+0.00") else text


def points(after: object, before: object) -> str:
    """The difference of two shares in percentage points, "–" where either is no number.

    >>> points(0.31, 0.325)
    '−1.5 pt'
    """
    a, b = finite(after), finite(before)
    if a is None or b is None:
        return NONE
    return f"{100 * (a - b):+.1f} pt".replace("-", "−")
