"""The vocabulary of the tiny world: fifteen products, their aspects, and what can be said about each.

A phrase may contain slots, ``[two|three]``. `grammar` accepts every choice, and reads all choices as the same phrase.
Predicates agree with their aspect in number.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Aspect:
    """A part of a product, and what can be said about it.

    Attributes:
        name: Name of the aspect.
        plural: Whether the name takes "are" and "they" rather than "is" and "it".
        praise: Concrete praise, as predicates.
        complaint: Concrete complaints, as predicates.
        good_outcomes: Consequences of what is praised, as clauses.
        bad_outcomes: Consequences of what is complained about, as clauses.
    """

    name: str
    plural: bool
    praise: tuple[str, ...]
    complaint: tuple[str, ...]
    good_outcomes: tuple[str, ...]
    bad_outcomes: tuple[str, ...]


ASPECTS: tuple[Aspect, ...] = (
    Aspect(
        "battery",
        False,
        (
            "lasts [two|three|four] full days",
            "charges in [twenty|thirty|forty] minutes",
            "still holds its charge after [six|nine|ten] months",
        ),
        (
            "dies before [noon|lunch|dinner]",
            "takes [five|six|seven] hours to charge",
            "drains overnight even when switched off",
        ),
        ("i stopped carrying a charger", "i leave the cable at home"),
        ("i carry a charger everywhere", "i need a spare every day"),
    ),
    Aspect(
        "screen",
        False,
        ("stays readable in [bright|direct|full] sunlight", "shows every small detail", "wakes in half a second"),
        (
            "scratched within [two|three] weeks",
            "looks washed out [outdoors|in daylight]",
            "freezes at least once a day",
        ),
        ("i can read on the [beach|balcony]", "i stopped wearing my glasses for it"),
        ("i have to squint all day", "i restart it every morning"),
    ),
    Aspect(
        "sound",
        False,
        (
            "fills [the kitchen|a large room|the whole garden]",
            "stays clear at full volume",
            "brings out every [voice|bass line|violin]",
        ),
        ("crackles at half volume", "cuts out every [ten|twenty] minutes", "gets lost in a [small|quiet] room"),
        ("i sold my old stereo", "we play it at every party"),
        ("i cannot follow a [film|conversation]", "i went back to my old stereo"),
    ),
    Aspect(
        "buttons",
        True,
        ("click firmly under [cold|wet] fingers", "sit right under the thumb", "still work after [two|three] years"),
        ("stick after [two|three] weeks", "are too small for [big|cold] fingers", "need [two|three] presses each time"),
        ("i can use it in the dark", "my [grandmother|father] manages alone"),
        ("i press the wrong one every time", "i gave up on the settings"),
    ),
    Aspect(
        "menu",
        False,
        (
            "needs only [two|three] taps for everything",
            "explains every option in plain words",
            "remembers my last [five|ten] choices",
        ),
        (
            "hides the clock under [six|seven|eight] pages",
            "resets itself every [week|month]",
            "mixes [three|four] languages",
        ),
        ("my [mother|uncle] learned it in an hour", "i found everything at once"),
        ("i still search for the basics", "i leave everything as it came"),
    ),
    Aspect(
        "manual",
        False,
        ("explains each step with a picture", "fits on [two|three] pages", "answered every question i had"),
        ("skips [three|four] important steps", "comes only in tiny print", "describes an older model"),
        ("i was ready in [ten|fifteen] minutes", "i never had to call anyone"),
        ("i watched [two|three] videos instead", "i called the shop for help"),
    ),
    Aspect(
        "price",
        False,
        (
            "beats every rival by [ten|twenty|thirty] dollars",
            "includes [two|three] years of cover",
            "dropped by [ten|twenty] percent in spring",
        ),
        (
            "rose by [ten|twenty] percent within a month",
            "is double what others ask",
            "leaves out shipping of [nine|twelve] dollars",
        ),
        ("i bought [two|three] of them", "i had money left for a gift"),
        ("i would wait for a sale", "i regret not shopping around"),
    ),
    Aspect(
        "cable",
        False,
        ("reaches across [the whole room|two rooms]", "rolls up in [three|five] seconds", "never tangles in a drawer"),
        ("is [one foot|two feet] too short", "tangles every single time", "frayed within [two|three] months"),
        ("i no longer need an extension", "i tidy up in no time"),
        ("i bought an extension", "i fixed it with tape"),
    ),
    Aspect(
        "handle",
        False,
        ("fits [small|large|wet] hands well", "feels solid after [two|three] years", "locks with one click"),
        ("wobbles after [two|three] weeks", "snapped on the [first|second|third] day", "digs into my palm"),
        ("i can lift it with one hand", "my wrist never hurts"),
        ("i hold it with both hands", "i glued it back on"),
    ),
    Aspect(
        "motor",
        False,
        ("runs quietly even at full speed", "starts at the first try", "still pulls hard after [two|three] years"),
        ("overheats after [five|ten] minutes", "howls like a [train|siren]", "smells burnt under load"),
        ("the baby sleeps through it", "the work takes half the time"),
        ("the neighbours complain", "i take a break every few minutes"),
    ),
    Aspect(
        "seat",
        False,
        ("stays comfortable for [three|four|five] hours", "supports my lower back", "wipes clean with one cloth"),
        ("goes flat after [two|three] weeks", "makes my back ache within an hour", "squeaks at every move"),
        ("my back pain is gone", "we stay out all day"),
        ("i added two cushions", "we stop every half hour"),
    ),
    Aspect(
        "wheels",
        True,
        ("roll smoothly over [cobbles|gravel|carpet]", "turn on the spot", "survived [two|three] winters"),
        ("rattle on every pavement", "lock up after [two|three] weeks", "came off on the [first|second] day"),
        ("i push it with one finger", "i reach the station faster"),
        ("i end up carrying it", "i ordered a new set"),
    ),
    Aspect(
        "brakes",
        True,
        (
            "stop within [one metre|two metres]",
            "grip even in [heavy rain|fresh snow]",
            "needed no care for [six|nine] months",
        ),
        ("squeal on every hill", "slip in the rain", "wore out in [two|three] months"),
        ("i feel safe downhill", "i take it out in winter"),
        ("i walk down steep hills", "i leave it at home when it rains"),
    ),
    Aspect(
        "light",
        False,
        ("reaches [twenty|thirty|forty] metres", "dims in [five|six] smooth steps", "stays warm and even"),
        ("flickers every [evening|few minutes]", "fades after [an hour|two hours]", "blinds me at night"),
        ("i see every corner", "i can stay up until midnight"),
        ("my eyes hurt after a while", "i bought a second one"),
    ),
    Aspect(
        "fabric",
        False,
        ("dries within [an hour|two hours]", "shrugs off heavy rain", "shows no wear after [forty|fifty|sixty] days"),
        ("soaks through in [ten|twenty] minutes", "tore on the [first|second|third] day", "smells of plastic"),
        ("we never worry about the weather", "it still looks new"),
        ("everything got wet", "i patched it twice"),
    ),
    Aspect(
        "zips",
        True,
        ("run smoothly with one hand", "keep out [rain|sand|dust]", "survived [forty|fifty] trips"),
        ("jam every [morning|second day]", "broke after [two|three] trips", "snag on the lining"),
        ("packing takes [two|three] minutes", "i open it without looking"),
        ("i need pliers to open it", "i close it with string"),
    ),
    Aspect(
        "straps",
        True,
        ("stay put on long walks", "spread [ten|twelve] kilos evenly", "adjust in [five|ten] seconds"),
        ("cut into my skin after [an hour|two hours]", "slip loose every [mile|hour]", "frayed within a month"),
        ("my shoulders never hurt", "i walk [ten|twelve] miles a day"),
        ("my shoulders ache every evening", "i tie a knot in them"),
    ),
)

ASPECT_BY_NAME: dict[str, Aspect] = {aspect.name: aspect for aspect in ASPECTS}

PRODUCTS: dict[str, tuple[str, ...]] = {
    "phone": ("battery", "screen", "sound", "buttons", "menu", "price"),
    "camera": ("battery", "screen", "buttons", "menu", "manual"),
    "speaker": ("battery", "sound", "buttons", "cable", "price"),
    "watch": ("battery", "screen", "buttons", "menu", "price"),
    "radio": ("battery", "sound", "buttons", "menu", "handle"),
    "vacuum": ("motor", "handle", "cable", "wheels", "price"),
    "drill": ("motor", "battery", "handle", "manual", "price"),
    "lamp": ("light", "cable", "buttons", "price"),
    "chair": ("seat", "fabric", "wheels", "manual", "price"),
    "tent": ("zips", "fabric", "manual", "price"),
    "backpack": ("straps", "zips", "fabric", "price"),
    "suitcase": ("wheels", "handle", "zips", "fabric", "price"),
    "bike": ("seat", "brakes", "wheels", "light", "price"),
    "pram": ("seat", "brakes", "wheels", "handle", "fabric", "straps"),
    "scooter": ("battery", "brakes", "wheels", "light", "price"),
}

DETERMINERS = ("the", "this", "my", "our")

# Words after is/are that express a feeling, and nothing that another buyer could check.
VAGUE: dict[int, tuple[str, ...]] = {
    +1: ("great", "excellent", "lovely", "superb", "a real joy", "better than expected", "simply perfect"),
    0: ("okay", "fine i guess", "what you would expect", "neither good nor bad"),
    -1: ("poor", "awful", "annoying", "useless", "a real letdown", "worse than expected", "simply bad"),
}
INTENSIFIERS = ("really", "truly", "quite")

VERDICTS: dict[int, tuple[str, ...]] = {
    +1: (
        "i would buy it again",
        "i recommend it to everyone",
        "i am very happy with it",
        "i love it",
        "it is worth every cent",
    ),
    -1: (
        "i sent it back",
        "i warn everyone about it",
        "i am tired of it",
        "i want my money back",
        "it was a waste of money",
    ),
}

FILLERS = (
    "as far as i can tell",
    "i must say",
    "to be honest",
    "if you ask me",
    "for what it is worth",
    "as i told my sister",
    "all things considered",
    "or so it seems",
)

# The module `grammar` accepts any of these numbers in a slot of numbers.
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "fifteen", "twenty",
           "thirty", "forty", "fifty", "sixty", "eighty")  # fmt: skip

# Connectives between clauses.
ADDITIVE = (", and", ", and also", ";")
CONTRASTIVE = (", but", ", while", ", yet")
CONSEQUENCE = (", so", ", and so", ", which is why")
CAUSE = ("because", "since", "mainly because")
