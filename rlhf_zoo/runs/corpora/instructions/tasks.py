"""The tasks of the corpus `instructions`: forms of text, and their possible topics."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task without instructions about its form.

    Attributes:
        form: What to write, such as "letter".
        topic: What the text is about.
        text: The request.
        is_question: Whether the answer is yes, no or maybe.
    """

    form: str
    topic: str
    text: str
    is_question: bool = False

    @property
    def group(self) -> str:
        """Name of the task's group; all tasks of a group are in the same split."""
        return f"{self.form}: {self.topic}"


#: Topics of the forms below.
SUBJECTS = (
    "tides", "volcanoes", "honey bees", "compost", "sleep", "inflation", "solar panels", "wind turbines",
    "chess openings", "sourdough bread", "green tea", "public libraries", "bicycle repair", "home insulation",
    "rainbows", "earthquakes", "recycling glass", "train timetables", "learning the guitar", "keeping a diary",
    "growing tomatoes", "camping in autumn", "morning runs", "vegetarian cooking", "night shifts", "city parks",
    "electric cars", "second-hand clothes", "board games", "house plants", "migrating birds", "coral reefs",
    "glaciers", "paper money", "passwords", "phishing", "spreadsheets", "job interviews", "working from home",
    "school lunches", "school uniforms", "first aid kits", "sunscreen", "vaccines", "migraines", "stretching",
    "swimming lessons", "snow chains", "ferry trips", "lighthouses", "castles", "Roman roads", "the printing press",
    "the telephone", "sailing ships", "steam engines", "satellites", "moon landings", "black holes", "magnets",
    "batteries", "rust", "soap", "yeast", "salt", "chocolate", "coffee beans", "olive oil", "cheese making",
    "street markets", "farm tractors", "tree houses", "puppet shows", "jazz", "opera", "watercolor painting",
    "pottery", "knitting", "wood carving", "origami", "photography at night", "short films", "detective novels",
    "fairy tales", "local newspapers", "podcasts", "weather forecasts", "hurricanes", "droughts", "wild mushrooms",
    "dog training", "cat food", "aquariums", "beekeeping", "fishing nets", "horse riding", "ice skating",
    "table tennis", "marathons", "yoga", "mountain huts", "desert plants", "rain barrels", "roof gardens", "bridges",
    "elevators", "traffic lights", "parking fees", "bus drivers", "nurses", "firefighters", "carpenters",
    "translators", "volunteers", "grandparents", "new neighbors", "birthday parties", "road trips", "family recipes",
    "lost luggage", "broken umbrellas", "winter coats", "old photographs", "pocket watches", "kitchen knives",
    "garden gnomes",
)  # fmt: skip

#: Form -> request to write about a subject.
FORMS = {
    "explanation": "Explain the basics of {topic} to a curious teenager.",
    "poem": "Write a poem inspired by {topic}.",
    "story": "Tell a short story in which {topic} play a part.",
    "ad": "Draft an advertisement for a club that is all about {topic}.",
    "email": "Compose an email that invites a colleague to a talk on {topic}.",
    "letter": "Write a letter to a town council that asks for a small budget for a project on {topic}.",
    "list": "Collect ideas for a school project on {topic}.",
    "summary": "Summarize what most people know about {topic}.",
    "advice": "A beginner is new to the subject of {topic}. Offer some practical advice.",
    "mistakes": "Which mistakes do people make when it comes to {topic}? Describe them.",
    "dialogue": "Invent a dialogue between two friends who disagree about {topic}.",
    "review": "Review an imaginary book on {topic}.",
    "speech": "Prepare a short speech about {topic} for a village festival.",
    "blog": "Write a blog post on how {topic} changed in the last fifty years.",
    "questions": "Think of questions that a reporter could put to an expert on {topic}.",
    "slogan": "Suggest names for a small shop that deals with {topic} and say why each fits.",
    "history": "Outline the history of {topic} for a museum leaflet.",
    "riddle": "Make up a riddle about {topic} and give its solution.",
    "plan": "Plan a one-day workshop on {topic} for adults.",
    "pros": "Weigh the good and bad sides of {topic}.",
    "song": "Write the lyrics of a cheerful song about {topic}.",
    "description": "Describe a picture that shows {topic}.",
    "news": "Write a news report about a surprising event that involves {topic}.",
    "facts": "Share facts about {topic} that would amaze a child.",
    "quiz": "Put together a quiz on {topic} with answers.",
    "thanks": "Write a thank-you note to somebody who taught you about {topic}.",
}

#: Pairs of choices, for advice and comparisons.
CHOICES = (
    ("a tent", "a cabin"), ("a laptop", "a tablet"), ("the mountains", "the seaside"), ("a cat", "a parrot"),
    ("tea", "coffee"), ("buying a flat", "renting a flat"), ("the train", "the plane"), ("paper books", "e-books"),
    ("a gas stove", "an electric stove"), ("a large city", "a quiet village"), ("studying alone", "studying together"),
    ("a fixed salary", "hourly pay"), ("summer", "winter"), ("a bicycle", "a scooter"), ("fresh pasta", "dried pasta"),
    ("a piano", "a violin"), ("cash", "cards"), ("a garden", "a balcony"), ("running", "rowing"), ("films", "plays"),
    ("early mornings", "late evenings"), ("handwritten notes", "typed notes"), ("a big wedding", "a small wedding"),
    ("wooden toys", "plastic toys"), ("a phone call", "a text message"), ("online classes", "evening classes"),
)  # fmt: skip
CHOICE_FORMS = {
    "comparison": "Compare {first} with {second}.",
    "recommendation": "My cousin cannot decide between {first} and {second}. Recommend one of them and say why.",
    "debate": "Stage a debate in which one side argues for {first} and the other side for {second}.",
    "essay": "Write a brief essay on why some prefer {first} while others prefer {second}.",
    "survey": "Design a survey that finds out who favors {first} over {second}.",
}

#: Statements for questions whose answer is yes, no or maybe.
CLAIMS = (
    "bees can see ultraviolet light", "a whale is a fish", "salt lowers the freezing point of water",
    "the moon has weather", "bread needs yeast to rise", "an adult can learn a language well",
    "cold air is heavier than warm air", "tomatoes are fruits", "all birds can fly",
    "reading in dim light harms the eyes", "glass can be recycled many times",
    "a day on Venus is longer than its year", "gold rusts in water", "cats always land on their feet",
    "people will live on Mars in fifty years", "remote work makes teams happier",
    "robots will cook in most kitchens soon", "a shorter school day would help pupils",
    "cities should ban cars from their centers", "dogs understand human moods", "chess is a sport",
    "most jobs need good handwriting", "paper maps are still useful", "sound travels faster in water",
    "plants grow better with music", "an owl can turn its head all the way around", "bananas are berries",
    "ice floats because it is lighter than water", "the sun is a star", "every metal is magnetic",
    "zoos do more good than harm", "a four-day week suits every company", "spiders are insects", "honey never spoils",
    "coins are cheaper to make than notes", "snow is always white", "pupils should choose their own homework",
    "video games can teach patience", "lightning never hits one place twice", "trees talk through their roots",
)  # fmt: skip
CLAIM_FORMS = {
    "check": "Is it true that {topic}?",
    "opinion": "Would you agree that {topic}?",
    "bet": "A friend bets that {topic}. Does the friend win?",
}


def tasks() -> Iterator[Task]:
    """Yields every task, always in the same order."""
    for form, template in FORMS.items():
        for topic in SUBJECTS:
            yield Task(form, topic, template.format(topic=topic))
    for form, template in CHOICE_FORMS.items():
        for first, second in CHOICES:
            yield Task(form, f"{first} or {second}", template.format(first=first, second=second))
    for form, template in CLAIM_FORMS.items():
        for topic in CLAIMS:
            yield Task(form, topic, template.format(topic=topic), is_question=True)
