"""Makes characters visible that a page would not show."""

import unicodedata

# Invisible joiners are part of emoji and of Arabic and Indic words, so they stay.
JOINERS = "\u200c\u200d"


def visible_text(text: str) -> str:
    """Replaces each character that is invisible, or that changes how other characters are shown.

    ASCII control characters except tab and line feed become their pictures (␀, ␛). Other control characters, direction
    marks, zero-width spaces, lone surrogates and unassigned code points become their code point, such as ⟨U+202E⟩.

    Args:
        text: Any text.
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    category, code = unicodedata.category(character), ord(character)
    if character in "\n\t" or character in JOINERS or category not in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
