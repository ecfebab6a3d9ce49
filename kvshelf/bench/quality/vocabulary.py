"""Word lists and sentence patterns of the generated documents; `kvshelf.bench.quality.tasks` puts them together.

Names of things are pairs of words drawn from two lists, so that there are far more of them (about 15,000) than a
training run can show: a model cannot memorise them and has to read.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()).split(", "))


ADJECTIVES: Final = _words(
    """amber ancient azure bitter blue bold brass brave bright broken bronze calm clever cobalt copper coral crimson
    crystal curious dusty eager early empty faded fancy fierce frozen gentle giant golden grand green grey hidden
    hollow honest humble icy iron ivory jolly lazy little lonely lost lucky marble mellow misty narrow nimble noble
    pale patient plain proud purple quiet rapid red restless rusty sacred scarlet secret silent silver simple sleepy
    solid stormy sunny swift tender tiny velvet violet wandering white wild wise wooden yellow young"""
)
CREATURES: Final = _words(
    """anchor anvil badger barrel beacon bear beaver bell bison candle cannon castle comet compass cricket crow dolphin
    dragon drum eagle engine falcon feather ferry fiddle fox garden hammer harbor harp hawk heron horse island
    jaguar kettle kite ladder lamp lantern lion lizard lynx magnet meadow mirror moose needle orchard osprey otter
    owl oyster panther parrot pelican pilot piper planet quarry rabbit raven river robin saddle sailor salmon shield
    sparrow spider swan temple tiger tower trumpet tunnel turtle valley wagon walrus whale willow wolf zebra"""
)
FIRST_NAMES: Final = _words(
    """Ada Alan Amir Anna Arno Bella Boris Carla Cedric Clara Dario Diana Edgar Elena Emil Eva Felix Fiona Greta Hanna
    Hugo Ida Igor Ines Ivan Jana Jonas Julia Karim Kira Lars Lena Leo Lina Luca Mara Marco Maya Mila Nadia Nils Nora
    Olga Oscar Otto Paula Pedro Petra Rosa Ruben Sara Simon Sofia Stella Tara Theo Ursula Victor Vera Yusuf"""
)
LAST_NAMES: Final = _words(
    """Abbott Adler Archer Baker Barlow Becker Bishop Brandt Carver Castro Chen Cooper Costa Curtis Dalton Dawson
    Ellison Farmer Fischer Fletcher Foster Garner Gibson Grant Hansen Harper Hoffman Hunter Ibsen Jansen Keller
    Kumar Lambert Larsen Lopez Marlow Mason Mercer Miller Moreno Morris Nolan Novak Olsen Parker Patel Porter Quinn
    Ramos Reyes Rossi Sanders Santos Sawyer Schmidt Silva Tanaka Taylor Turner Vargas Walker Weber Winter Young"""
)
PLACE_NAMES: Final = _words(
    """Alder Ashford Avon Barton Belmont Bristol Carlow Chester Clifton Dover Dunmore Easton Elmwood Fairview Glenwood
    Granby Hadley Harlow Hilton Kendal Kingston Lancaster Linden Malden Maple Milton Newport Norton Oakley Oxford
    Preston Ridley Salem Selby Sutton Thornton Upton Warwick Weston Windsor"""
)
PLACE_KINDS: Final = _words(
    """Airport Bank Bridge Church Clinic College Court Depot Farm Gallery Hotel Library Market Mill Museum Park Pier
    Plant School Square Station Street Theatre Wharf"""
)
UNIT_LETTERS: Final = _words(
    """Alpha Bravo Charlie Delta Echo Foxtrot Golf India Kilo Lima Mike November Oscar Papa Quebec Romeo Sierra Tango
    Uniform Victor Whiskey Zulu"""
)
UNIT_NUMBERS: Final = _words(
    """One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve Thirteen Fourteen Fifteen Sixteen Seventeen
    Eighteen Nineteen Twenty Thirty Forty Fifty Sixty"""
)
PAPERS: Final = _words(
    """account agreement appeal archive claim contract estate file fund grant lease licence loan order report trial"""
)

ATTRIBUTES: Final = _phrases(
    """access code, account number, alarm code, badge number, balance, batch number, bill, budget, case number, code,
    contract number, deposit, door code, file number, invoice number, key number, licence number, locker number,
    membership number, meter reading, number, order number, parcel number, phone number, price, reference number,
    registration number, safe combination, secret number, serial number, ticket number, tracking number, weight"""
)

# {a} is the attribute, {e} the thing, {v} the value. The value follows the thing, as a causal model needs it.
FACT_PATTERNS: Final = (
    "The {a} of {e} is {v}.",
    "The {a} for {e} is {v}.",
    "The {a} given to {e} is {v}.",
    "Note that the {a} of {e} is {v}.",
    "As agreed, the {a} for {e} is {v}.",
    "The clerk recorded the {a} of {e} as {v}.",
    "From now on the {a} of {e} is {v}.",
    "According to the register, the {a} of {e} is {v}.",
    "The {a} of {e} is {v}, and it must not be changed.",
    "The {a} for {e} is {v}, as stated before.",
    "Please remember that the {a} for {e} is {v}.",
    "The {a} of {e} was {v} on the day of the review.",
    "The {a} for {e} was set to {v}.",
    "Entry for the {a} of {e}: {v}.",
)
QUESTION_PATTERNS: Final = (
    "What is the {a} of {e}?",
    "What is the {a} for {e}?",
    "Which {a} was given to {e}?",
    "Please state the {a} of {e}.",
    "Tell me the {a} for {e}.",
    "According to the document, what is the {a} of {e}?",
    "What does the document give as the {a} of {e}?",
    "Find the {a} of {e}.",
)

# Questions of the quality bench that ask for several things at once. The bundled model was not trained on them.
ALL_VALUES_PATTERNS: Final = (
    "What are all the {a}s of {e}?",
    "List every {a} of {e} that the document gives.",
    "Find all {a}s of {e}.",
)
SEVERAL_THINGS_PATTERNS: Final = ("What are {list}?", "Please state {list}.", "Find {list}.")
VARIABLES_QUESTION: Final = "Find all variables that are assigned the value {v} in the document, directly or not."
COMMON_WORDS_QUESTION: Final = "What are the {n} most common words in the list?"

# The haystack of the passkey test (Mohtashami and Jaggi, 2023), which RULER repeats as well.
FILLER: Final = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip

# Slots of the prose: a list of alternatives each. A slot in lower case is drawn anew at every use.
SLOTS: Final[dict[str, tuple[str, ...]]] = {
    "role": _words(
        """buyer seller tenant owner manager clerk engineer inspector driver operator supplier client partner auditor
        captain director doctor editor farmer guard nurse officer painter porter teacher witness worker writer"""
    ),
    "object": _words(
        """pump valve filter cable switch motor panel sensor gate roof wall floor window door bridge boiler cabinet
        pipe tank crane truck boat train parcel letter map table chair desk box bottle book clock camera coat rope
        stone wheel machine printer screen battery bolt cover handle hose"""
    ),
    "mass": _words(
        """water oil steam grain timber coal paper cloth sugar salt wool glass steel sand clay bread cheese tea coffee
        wine"""
    ),
    "paper": PAPERS,
    "verbed": _words(
        """cleaned moved painted repaired replaced tested opened closed checked measured counted stored delivered
        collected returned accepted refused approved reviewed signed copied sold bought carried washed found lost
        shown"""
    ),
    "verb": _words(
        """clean move paint repair replace test open close check measure count store deliver collect return accept
        refuse approve review sign copy sell buy carry wash find"""
    ),
    "state": _words(
        """clean dry cold warm heavy light strong weak useful ready complete empty full safe noisy quiet new old open
        closed clear correct late normal stable"""
    ),
    "part": _words("morning afternoon evening night spring summer autumn winter weekend holiday"),
    "month": _words("January February March April May June July August September October November December"),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "unit": _words("days weeks months hours minutes years"),
    "measure": _words("boxes bags tons litres metres pages pieces copies visitors workers houses trees"),
    "reason": _phrases(
        """because of the rain, because of the noise, for reasons of safety, as a matter of habit, without any delay, at
        no extra cost, in good faith, with great care, by mistake, under the same conditions, in the presence of two
        witnesses, to everyone's surprise, on request"""
    ),
    "where": _phrases(
        """in the cellar, in the main hall, near the river, behind the station, at the front desk, on the second floor,
        under the bridge, across the yard, beside the old mill, at the end of the road, in the north wing, in the
        storage room, outside the city, along the coast, at the harbour"""
    ),
    "link": tuple(
        f"{link},"
        for link in _phrases(
            "However, Moreover, In addition, Afterwards, For this reason, As a rule, In practice, Later"
        )
    ),
}

# Prose patterns by kind of text. {name}, {place}, {thing} name people, places and things at random; {n} and {year} are
# numbers.
PROSE: Final[dict[str, tuple[str, ...]]] = {
    "contract": (
        "The {role} shall pay the {role} within {n} {unit} after the {paper} is signed.",
        "If the {object} is not {state}, the {role} may refuse the {paper}.",
        "Either party may end this {paper} with a notice of {n} {unit}.",
        "The {role} shall {verb} every {object} {reason}.",
        "Section {n} applies to the {role} and to the {role} alike.",
        "All {mass} delivered before {month} {n} remains the property of the {role}.",
        "{name} signed the {paper} in {place} on {day}, {month} {n}, {year}.",
        "Nothing in this {paper} limits the duty of the {role} to {verb} the {object}.",
        "{link} the {role} keeps a copy of the {paper} for {n} {unit}.",
        "Any change to the {paper} must be {verbed} by the {role} and the {role}.",
        "No more than {n} {measure} of {mass} may be stored {where}.",
        "The court in {place} decides when the {role} and the {role} do not agree.",
    ),
    "manual": (
        "Before you {verb} the {object}, make sure that the {object} is {state}.",
        "Turn the {object} slowly until the {object} is {state}.",
        "Do not {verb} the {object} while the {object} is {state}.",
        "{link} {verb} the {object} and {verb} the {object}.",
        "The {object} holds up to {n} litres of {mass}.",
        "Wait {n} {unit} before you {verb} the {object} again.",
        "If the {object} stays {state}, ask the {role} to {verb} it.",
        "Keep the {object} away from {mass} and from any {state} {object}.",
        "See page {n} for the {object} and page {n} for the {object}.",
        "Any {state} {object} should be {verbed} every {n} {unit}.",
        "Use only {mass} that has been {verbed} by the {role}.",
        "The {object} was designed in {place} in {year} and has hardly changed since.",
    ),
    "log": (
        "At {n} minutes past {n} the {role} {verbed} the {object} {where}.",
        "On {day} {name} {verbed} {n} {measure} {where}.",
        "The {object} was {verbed} and found to be {state}.",
        "{name} reported that the {object} was {state} again.",
        "Nothing happened during the {part}, and the {object} stayed {state}.",
        "The {role} from {place} arrived {where} with {n} {measure} of {mass}.",
        "{link} the {role} {verbed} the {object} {reason}.",
        "{n} {measure} of {mass} were {verbed} in the {part}.",
        "The {part} of {month} {n} was {state}, and the {role} {verbed} {thing}.",
        "{name} and {name} {verbed} the {object} before the {part}.",
        "Work on the {object} was stopped for {n} {unit} {reason}.",
        "{thing} was seen {where} in the {part}.",
    ),
    "chronicle": (
        "In {year} the people of {place} {verbed} the first {object} {where}.",
        "{name} wrote a long letter about the {object} and the {mass}.",
        "The {state} {role} told {name} a story about {thing}.",
        "Every {part} the {role} walked to {place} to {verb} the {mass}.",
        "Nobody in {place} could remember any {part} as {state} as this one.",
        "It was said that {thing} had been {verbed} by {name} {reason}.",
        "{link} {name} left {place} and became the {role}.",
        "The {role} loved {mass}, {mass} and every {state} {object}.",
        "There were {n} {measure} {where}, and each of them was {state}.",
        "After {n} {unit} the {role} returned to {place} with a {object} and some {mass}.",
        "The road to {place} was {state}, so {name} waited {where}.",
        "When the {part} came, the {role} and {name} {verbed} the {object} together.",
    ),
}

# Sentences that mention a thing which also has a fact, without its value: the name alone must not be enough.
MENTIONS: Final = (
    "Nobody had asked about {e} before.",
    "The {role} spoke at length about {e}.",
    "A note on {e} was kept {where}.",
    "{link} {e} was not part of the {paper}.",
    "There was some doubt about {e} in the {part}.",
    "The {role} and {e} were mentioned in the same {paper}.",
)
HEADINGS: Final = (
    "Section {n}. The {paper}",
    "Chapter {n}",
    "Part {n}: {place}",
    "{day}, {month} {n}",
    "Notes of the {role}",
    "About the {object}",
    "The {object} and the {mass}",
    "Appendix {n}",
)
