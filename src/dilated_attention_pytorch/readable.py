"""Large numbers and durations as people read them."""

from __future__ import annotations

_WORDS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))


def in_words(number: float) -> str:
    """A number with three digits, and a word for its size from a million on.

    >>> in_words(1_234_567_890), in_words(98_765), in_words(2.3461e16), in_words(0.01234), in_words(999_999)
    ('1.23 billion', '98,800', '23,500 trillion', '0.0123', '1 million')
    """
    number = float(f"{number:.3g}")
    for size, word in _WORDS:
        if number >= size:
            return f"{_plain(number / size)} {word}"
    return _plain(number)


def in_time(seconds: float) -> str:
    """A duration in its two largest units.

    >>> in_time(0.01234), in_time(59.96), in_time(3725), in_time(200_000), in_time(7.5), in_time(2.19e-7)
    ('12.3 ms', '1 min 0 s', '1 h 2 min', '2 d 8 h', '7.5 s', '0.219 us')
    """
    if seconds < 1e-4:
        return f"{_plain(1e6 * seconds)} us"
    if seconds < 1:
        return f"{_plain(1000 * seconds)} ms"
    if seconds < 59.95:
        return f"{_plain(seconds)} s"
    for large, small, parts, length, most in (("min", "s", 60, 1, 60), ("h", "min", 60, 60, 24)):
        whole, part = divmod(round(seconds / length), parts)
        if whole < most:
            return f"{whole} {large} {part} {small}"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours} h"


def _plain(number: float) -> str:
    """Three digits without an exponent."""
    return f"{float(f'{number:.3g}'):,.10f}".rstrip("0").rstrip(".")
