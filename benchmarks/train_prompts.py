"""Generated prompts for training drafters: a JSONL file of many kinds of requests, the same for the same seed.

python benchmarks/train_prompts.py --count 6000 --seed 0 --output prompts.jsonl [--passages FILE ...]

A drafter learns from the text that its target writes, so it wants prompts as broad as what it will meet: open chat,
summaries of articles, German sentences to translate, short questions, questions about passages, Python functions to
complete and word problems. All are written here from word lists, patterns and small grammars; nothing is taken from
a benchmark. Some passages are prose from the documentation that comes with the interpreter (so another version of
Python writes other ones), and --passages adds your own: plain text, or JSONL with a "text" in each line. Each line
written is {"id", "category", "messages"}, like the lines of a workload.

Patterns: [a|b] is a choice, {slot} a word of that list, the same one wherever it comes again in a text ({slot2} is
another), {3-40} a number, ~ parts sentences.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SHARES = {
    "chat": 0.25,
    "summarization": 0.17,
    "translation": 0.17,
    "qa": 0.13,
    "rag": 0.13,
    "code_complete": 0.10,
    "math": 0.05,
}
MOST_WORDS = 880  # of a prompt


def listed(text: str, separator: str = ";") -> tuple[str, ...]:
    """The entries of a word list that is wrapped anywhere."""
    return tuple(entry for part in text.split(separator) if (entry := " ".join(part.split())))


def blocks(text: str) -> list[tuple[str, ...]]:
    """The sentence patterns of each block; an empty line parts blocks."""
    return [listed(block, "~") for block in re.split(r"\n\s*\n", text) if block.strip()]


SLOTS: dict[str, tuple[str, ...]] = {
    name: listed(text)
    for name, text in {
        "first": """Amara; Jonas; Priya; Mateo; Ingrid; Kofi; Leila; Tomasz; Yuki; Carmen; Dmitri; Fatima; Gareth;
            Hana; Ivo; Joyce; Kasper; Lucia; Malik; Nadia; Oscar; Petra; Quentin; Rosa; Samir; Tessa; Umar; Vera;
            Wendell; Xenia; Yusuf; Zoe; Alice; Bernard; Celeste; Darius; Elena; Felix; Greta; Howard; Isabel; Jamal;
            Karen; Liam; Marta; Noah; Olga; Paul; Ruth; Stefan; Tanya; Ursula; Victor; Walter; Yvonne; Abel; Bianca;
            Cyrus; Delia; Edwin; Farah; Gordon; Helen; Igor; June; Keith; Lena; Martin; Nina; Owen; Paula; Ravi;
            Sofia; Theo; Valeria; Ana""",
        "last": """Okafor; Lindqvist; Sharma; Delgado; Novak; Mensah; Haddad; Kowalski; Tanaka; Ruiz; Petrov;
            Rahman; Hughes; Kim; Marchetti; Abbott; Nielsen; Ferreira; Jackson; Castellanos; Brandt; Moreau; Ali;
            Whitfield; Osei; Romano; Keller; Singh; Doyle; Yamamoto; Bianchi; Fischer; O'Leary; Patel; Vega; Larsen;
            Dubois; Hossain; Carver; Mbeki; Stone; Aguirre; Blackwood; Chen; Drummond; Eriksen; Fontaine; Grayson;
            Hartley; Ivanova; Jensen; Karim; Lopez; MacLeod; Nguyen; Ortega; Pereira; Quigley; Rossi; Santos;
            Thornton; Usman; Varga; Weaver; Yilmaz; Zimmer; Ashworth; Barlow; Costa; Dlamini; Ellison; Forsyth;
            Goldberg; Holm; Ito; Kaur""",
        "person": "{first+} {last+}",
        "town": """Bristol; Porto; Leeds; Toledo; Kraków; Gothenburg; Adelaide; Halifax; Nairobi; Valparaíso; Lyon;
            Turin; Aberdeen; Tampa; Denver; Kyoto; Accra; Lima; Ghent; Graz; Bergen; Tucson; Omaha; Cardiff;
            Seville; Zagreb; Riga; Tartu; Cork; Nantes; Bari; Dresden; Malmö; Utrecht; Boise; Spokane; Perth;
            Dunedin; Durban; Kigali; Pune; Kochi; Busan; Cebu; Izmir; Haifa; Tunis; Rabat; Quito; Córdoba; Rosario;
            Natal; Recife; Montreal; Winnipeg; Hobart; Plymouth; Norwich; Exeter; Dundee; Galway; Brno; Pécs; Cluj;
            Varna; Split; Patras; Leipzig; Savannah; Richmond; Albany; Fresno; Eugene; Madison; Duluth; Tulsa;
            Amarillo; Baton Rouge; Chattanooga""",
        "country": """Portugal; Kenya; Chile; Norway; Vietnam; Canada; Poland; Morocco; New Zealand; Peru; Ireland;
            Ghana; Greece; Japan; Mexico; Austria; Uganda; Denmark; Argentina; Finland; Indonesia; Spain; Iceland;
            Romania; Bolivia; South Korea; Croatia; Tanzania; Sweden; Thailand; Uruguay; Estonia; Sri Lanka; Turkey;
            Jordan""",
        "region": """[North|South|East|West] {shire}; the {river} valley; the {river} delta; {shire} County; the
            {shire} coast; the {shire} highlands; the {town3} area""",
        "shire": """Harrow; Kestrel; Ashby; Marlow; Pendle; Calder; Wexley; Thornbury; Linden; Barrow; Hollis;
            Redmond; Carrow; Dunmore; Elkhart; Fenwick; Galloway; Holloway; Jasper; Kenmare; Lakewood; Monroe;
            Norwood; Oakdale""",
        "river": """Avel; Torrin; Sorel; Maren; Isk; Dovan; Lune; Tamsa; Orla; Vessel; Brenta; Nerin; Calla; Rhoden;
            Ulma""",
        "day": "Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday",
        "month": "January; February; March; April; May; June; July; August; September; October; November; December",
        "year": "{1986-2023}",
        "money": "[$|£|€]{2-90}[ million|.{1-9} million|00,000|0,000|,{100-999}]",
        "count": "[{2-9}0|{2-9}00|{11-99}|{1-9},{100-999}|more than {2-9}0|about {2-9}00|at least {3-30}]",
        "agency": """Reuters; the Associated Press; the local radio station; the {town} Gazette; public radio; the
            BBC; the Daily Courier; the Evening Post; the Herald; a local newspaper""",
        "colour": "red; blue; green; yellow; white; black; silver; orange; purple; grey; turquoise; brown",
        "animal": """otter; owl; bear; fox; tortoise; penguin; horse; python; elephant; wolf; seal; parrot; cat;
            dog; goat; beaver; heron; octopus; tiger; crocodile; hedgehog; lynx; swan; bat; donkey; koala; raccoon;
            whale""",
        "food": """bread; cheese; chocolate; noodles; olive oil; honey; coffee; tea; rice; apples; tomatoes; salmon;
            mushrooms; lentil soup; pancakes; ice cream; potatoes; garlic; oranges; yoghurt; pizza; curry; dumplings""",
        "sport": """football; basketball; tennis; rugby; cricket; hockey; volleyball; handball; baseball; cycling;
            swimming; rowing; badminton; athletics; netball; water polo""",
        "job": """nurse; teacher; carpenter; bus driver; pharmacist; farmer; software developer; chef; plumber;
            librarian; pilot; firefighter; electrician; baker; fisherman; architect; journalist; dentist; cleaner;
            accountant; postal worker; gardener; musician; engineer; shop owner; lawyer; midwife; retired miner;
            student; translator; welder""",
        "disease": """malaria; diabetes; asthma; influenza; measles; arthritis; migraine; high blood pressure;
            dementia; tuberculosis; hay fever; stroke; heart disease; kidney disease; insomnia; anaemia; depression""",
        "skill": """cooking; public speaking; chess; playing the guitar; drawing; swimming; speaking Spanish;
            photography; sewing; gardening; typing quickly; juggling; meditation; running long distances; writing
            short stories; budgeting; baking bread; reading maps; woodworking; learning vocabulary; negotiating;
            statistics; calligraphy; skiing""",
        "device": """bicycle; refrigerator; washing machine; camera; microwave oven; telescope; laptop; printer;
            thermostat; battery; drone; electric car; smartphone; solar panel; vacuum cleaner; pressure cooker;
            sewing machine; headphones; smoke detector; lawn mower; coffee machine; satellite dish; heat pump;
            router; hearing aid""",
        "science": """photosynthesis; gravity; plate tectonics; evaporation; the immune system; black holes; natural
            selection; electric current; sound waves; the water cycle; DNA replication; nuclear fusion; magnetism;
            osmosis; inertia; entropy; the greenhouse effect; radioactivity; tides; rainbows; fermentation;
            friction; the nervous system; buoyancy; lightning; superconductivity; enzymes; antibiotic resistance;
            the Doppler effect; crystals; volcanic eruptions; the carbon cycle; relativity; quantum entanglement;
            stem cells; chemical equilibrium; oxidation; the rock cycle; refraction; heat transfer; seasons;
            eclipses; comets; coral bleaching; hormones; blood types; food chains; catalysts; semiconductors; wave
            interference; acids and bases; symbiosis""",
        "computing": """recursion; hash tables; binary search; version control; a compiler; public-key encryption;
            caching; neural networks; an operating system; a relational database; garbage collection; TCP; a REST
            API; unit tests; sorting algorithms; a linked list; floating-point numbers; big-O notation;
            multithreading; DNS; a firewall; virtual machines; regular expressions; object-oriented programming; a
            web browser; data compression; a search engine; two-factor authentication; cloud storage; open-source
            licences; machine learning""",
        "history": """the French Revolution; the Silk Road; the Roman Republic; the Industrial Revolution; the Cold
            War; the printing press; the Black Death; the Space Race; the Renaissance; the fall of the Berlin Wall;
            the Ottoman Empire; the Great Depression; the Meiji Restoration; the Mongol Empire; ancient Athens; the
            Inca Empire; the American Civil War; the Suez Canal; the Hanseatic League; the Age of Exploration;
            women's suffrage; the Gold Rush; decolonisation in Africa; the Treaty of Versailles; the Enlightenment;
            feudalism; the Phoenicians; the Congress of Vienna; the Viking voyages; the Marshall Plan; the Library
            of Alexandria""",
        "idea": """democracy; inflation; free will; globalisation; utilitarianism; supply and demand; human rights;
            stoicism; censorship; opportunity cost; justice; nationalism; the social contract; compound interest;
            existentialism; gender roles; the placebo effect; confirmation bias; monopoly; tragedy in drama; irony;
            separation of powers; cultural identity; secularism; taxation; the prisoner's dilemma; happiness;
            courage; friendship; privacy; forgiveness; propaganda; beauty; federalism; GDP; cognitive dissonance;
            minimalism; patriotism""",
        "writer": """Jane Austen; Franz Kafka; Toni Morrison; Chinua Achebe; Leo Tolstoy; Emily Dickinson; Mary
            Shelley; Homer; Gabriel García Márquez; Virginia Woolf; George Orwell; Charles Dickens; Rumi; Agatha
            Christie; Molière; Fyodor Dostoevsky; Mark Twain; Herman Melville; Charlotte Brontë; Jorge Luis Borges;
            Oscar Wilde; Ovid""",
        "habit": """remote work; school uniforms; a four-day working week; electric scooters; homework; online
            shopping; zoos; tourism in small villages; free public transport; video games; fast fashion; nuclear
            power; social media; eating less meat; lotteries; private space flight; standardised tests; tipping in
            restaurants; cash; e-books; artificial intelligence in medicine; plastic bottles; working from cafés;
            home schooling; car-free cities; a universal basic income; daylight saving time; single-use packaging;
            keeping exotic pets; long commutes""",
        "thing": """lighthouse; lost suitcase; broken clock; old map; night train; abandoned greenhouse; talking
            mirror; rusty key; island; snowstorm; violin; letter that arrives late; robot; rooftop garden; small
            bakery; deep well; space station; circus; forgotten library; marathon; time capsule; desert road;
            bridge; treehouse; museum at night; ferry; blue umbrella; chess game; power cut; village festival;
            hot-air balloon; attic; radio signal; winter market; paper boat; stray dog; mountain hut; garden wall;
            first snow; secret recipe; fishing boat""",
        "person_kind": """[retired|young|grumpy|cheerful|famous|shy|tired|curious|forgetful|ambitious]
            [detective|sea captain|
            librarian|astronaut|beekeeper|inventor|clockmaker|king|gardener|baker|pianist|spy|doctor|farmer|magician|
            painter|lighthouse keeper|teacher|mapmaker|ghost|dragon|robot|taxi driver|botanist|explorer]""",
        "occasion": """birthday party; wedding; job interview; team meeting; school reunion; charity run; farewell
            dinner; book club; housewarming; science fair; graduation; neighbourhood clean-up; camping trip;
            retirement party; product launch; family picnic; conference; open day; cooking class; board game night""",
        "business": """bookshop; coffee shop; bicycle repair shop; online language school; flower shop; bakery;
            fitness app; vegetable box service; pottery studio; travel agency; dog-walking service; second-hand
            clothes shop; toy shop; small hotel; podcast; mobile hairdresser; tutoring company; farm shop; food
            truck; music school""",
        "problem": """trouble falling asleep; a noisy neighbour; too many meetings; a messy garage; stage fright; a
            flat tyre; a small budget; a shy child; slow internet; an exam in two weeks; back pain from sitting; a
            houseplant that is dying; homesickness; a colleague who interrupts; no time for exercise; a cat that
            scratches the sofa; a forgotten password; a high electricity bill; a fear of flying; procrastination; a
            picky eater at home; a long commute; mould in the bathroom; a puppy that barks at night; an argument
            with a friend; dry skin; a phone that runs out of battery by noon; writer's block; a team that misses
            deadlines; weeds in the lawn""",
        "place_kind": """harbour; forest after rain; busy railway station; kitchen of a restaurant; desert at dawn;
            old library; mountain lake; night market; empty theatre; farm in autumn; hospital waiting room;
            spaceship; fishing village; rooftop in summer; cave; frozen river; fairground; workshop; courtyard;
            monastery; airport at midnight""",
    }.items()
}


class Writer:
    """Fills patterns; a slot keeps its word as long as the writer lives."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bound: dict[str, str] = {}

    def fill(self, pattern: str) -> str:
        """The pattern with choices made and slots filled."""
        while "[" in pattern:  # innermost first
            pattern = re.sub(r"\[([^\[\]]*)\]", lambda found: self.rng.choice(found[1].split("|")), pattern)
        text = re.sub(r"\{(\d+)-(\d+)\}", lambda found: str(self.rng.randint(int(found[1]), int(found[2]))), pattern)
        text = re.sub(r"\{(\w+?)(\d*)(\+?)\}", self._slot, text)
        text = re.sub(r"\b(fox|lynx|octopus|ostrich)s\b", r"\1es", text).replace("wolfs", "wolves")
        text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])(?!one|uni|use|euro|Euro|Uni)", r"\1n ", text)
        return " ".join(text.split(" ")).replace("  ", " ")

    def sentence(self, pattern: str) -> str:
        """A filled pattern that begins with a capital letter."""
        text = self.fill(pattern)
        return text[:1].upper() + text[1:]

    def _slot(self, found: re.Match[str]) -> str:
        name, number, fresh = found.groups()
        if name == "surname":
            return self.fill(f"{{person{number}}}").split()[-1]
        if name + number in self.bound and not fresh:
            return self.bound[name + number]
        for _ in range(9):
            word = self.fill(self.rng.choice(SLOTS[name]))
            if word not in self.bound.values():
                break
        if not fresh:
            self.bound[name + number] = word
        return word


# Chat

CHAT = listed(
    """
    I'm a {job} in {town}, and for [some weeks|months] I've had {problem}. I've already tried to ignore it and to
    talk about it with my [boss|family|doctor]. Suggest a plan for the next [two weeks|month], with one small step
    for each [day|week]. ~
    We're organising a {occasion} for {12-90} people in {town} with a budget of {money}. Write a plan with a
    timetable, a shopping list that includes {food} and {food2}, and a list of who does what. ~
    Imagine that you are a {person_kind} who meets a {person_kind2} at a {place_kind}. They disagree about {idea}.
    Write the scene as a dialogue in which neither of them wins. ~
    Evaluate this review on a scale of 1 to 5 and explain why: "The {device} arrived [on time|two weeks late], works
    [well|only now and then], and is [louder|smaller|cheaper] than I thought. The {colour} paint [came off|looks
    great]." ~
    Here is the first line of a story: "When {first} opened the door, the {animal} was already sitting next to the
    {thing}." Continue it for three paragraphs and end with a surprise. ~
    Turn these notes into a short report: {count} visitors in {month}; {food} sold out twice; new {device} needed;
    complaint from a {job}; next {occasion} on {day}. ~
    Some people say that {habit} harms {idea}, others see a chance in it. Describe both positions in your own words,
    and then say which one a {job} would be likely to hold and why. ~
    Explain to a {job} what {science} has to do with a {device}, without formulas, and then give one question to
    test whether the explanation was understood. ~
    Write a [short|funny|touching|mysterious|suspenseful] story about a {person_kind} and a {thing}. ~
    Write a [short poem|haiku sequence|limerick|sonnet|free-verse poem] about a {thing}[.|, and give it a title.] ~
    Tell me a bedtime story in which a {animal} finds a {thing}. ~
    Write the opening paragraph of a [crime|fantasy|science fiction|historical|romance] novel set in a {place_kind}.
    ~
    Describe a {place_kind} to someone who has never seen one. Use [all five senses|vivid imagery|simple words]. ~
    Write a dialogue between a {person_kind} and a {animal} about {idea}. ~
    Draft [a polite|a formal|a friendly|a short] email to [my manager|a customer|my landlord|a colleague|my
    professor] [asking for help with|about] {problem}. ~
    Write an email that invites {count} people to a {occasion} on {day}. Mention the place, the time and what to
    bring. ~
    I run a {business} in {town}. [Write a slogan and a short description for it.|Suggest five ways to find new
    customers.| Write a post for social media that announces our reopening.|Write a reply to a customer who
    complained about waiting.] ~
    Write a [blog post|short article|newsletter entry|column] about {skill} [for beginners|for busy people|for
    teenagers]. ~
    Write a [persuasive|balanced|short] essay on {habit}. ~
    What are the [advantages and disadvantages|main arguments for and against|effects on young people] of {habit}? ~
    Should [the government|schools|cities|companies] do more about {habit}? [Give your opinion with reasons.|Argue
    both sides.] ~
    Explain {science} [to a ten-year-old|in simple terms|to a university student|with an everyday example|step by
    step]. ~
    What is {science}, and why does it matter [in everyday life|for engineers|for the climate|in medicine]? ~
    How does {science} work? [Please keep it under 150 words.|Give one example.|List the main steps.|] ~
    Compare {science} and {science2}: what do they have in common, and how do they differ? ~
    Explain {computing} [to someone who has never programmed|with an analogy|in two paragraphs|and when to use it].
    ~
    What is the difference between {computing} and {computing2}? ~
    Which mistakes do beginners make with {computing}, and how can they avoid them? ~
    What were the [causes|consequences|most important events|main figures] of {history}? ~
    How did {history} change [trade|daily life|politics|science|art] in the years that followed? ~
    Imagine you lived at the time of {history}. Write a diary entry about one day. ~
    Write a short quiz with [three|four|five] questions about {history}, with the answers at the end. ~
    What does {idea} mean? [Give a definition and two examples.|How has its meaning changed over time?|Who wrote
    about it?] ~
    Discuss how {idea} and {idea2} are related. ~
    How would {writer} describe a {thing}? Write one paragraph in that style. ~
    What are the main themes in the works of {writer}? ~
    Pretend to be a {person_kind} who has to explain {habit} to a visitor from the past. ~
    You are a {person_kind}. A stranger asks you about a {thing}. Stay in character and answer. ~
    Act as [an interviewer|a coach|a tour guide|a strict teacher|a doctor|a travel agent] and help me prepare for a
    {occasion}. ~
    You are a guide in {town}. [Plan one day for a family with small children.|Suggest a walk through the old town.|
    Recommend food, museums and a day trip.] ~
    Plan a [three-day|weekend|one-week] trip to {country} for someone who likes {skill} and {food}. ~
    Give me [five|seven|ten|three] tips for {skill}. ~
    How can I get better at {skill} [in a month|without spending money|as an adult|if I only have ten minutes a
    day]? ~
    Make a weekly plan for practising {skill}. ~
    I have {problem}. What [should I do|can I try|would you advise]? ~
    My [brother|friend|neighbour|colleague|daughter] has {problem}. How can I help? ~
    Give advice to a {job} who is worried about {idea}. ~
    Describe a typical day of a {job} in {town}. ~
    Which questions might come up in a job interview for a {job}? List [six|eight|ten] and answer one of them. ~
    Write a cover letter for a {job} who wants to move to {country}. ~
    Write a product description for a new {colour} {device}. ~
    How does a {device} work? Explain the main parts. ~
    Write instructions for cleaning a {device}, as a numbered list. ~
    What should I look for when I buy a {device}? ~
    My {device} has stopped working. Which steps can I take to find the fault? ~
    Suggest a [simple|vegetarian|cheap|festive] dish with {food} and {food2}, with ingredients and steps. ~
    Where does {food} come from, and how is it made? ~
    List [five|eight|ten] facts about [{country}|the {animal}|{food}|{town}]. ~
    How do {animal}s differ from {animal2}s? Write a table of differences. ~
    What would happen if [there were no {food} any more|everyone had a {device}|{animal}s could talk|we all moved to
    {town}]? ~
    {person} has {3-9} {colour} boxes and {2-8} {colour2} boxes. Each {colour} box holds {2-9} keys, each {colour2}
    box {3-9}. How many keys are there? Explain your reasoning. ~
    {first} is older than {first2}, and {first2} is older than {first3}. Who is the youngest? Explain. ~
    {first} sits to the left of {first2} and to the right of {first3}. {first4} sits at the far right. In which
    order do they sit? ~
    If all {animal}s in a zoo are {colour} and {first} looks after a {colour} animal, must it be a {animal}? Why? ~
    A {job}, a {job2} and a {job3} share a flat. Each has a different pet: a {animal}, a {animal2} and a {animal3}.
    The {job} is afraid of the {animal}, and the {job2} owns the {animal3}. Who owns which pet? ~
    Classify these words into [two|three] groups and name the groups: {animal}, {food}, {device}, {animal2},
    {food2}, {colour}, {device2}. ~
    Put these in order of [size|weight|usefulness|age] and say why: a {animal}, a {device}, a {animal2}, a {thing}.
    ~
    Extract all names and places from this text as a list: "{person}, a {job} from {town}, met {person2} in
    {country} in {year}. They opened a {business} in {town2}." ~
    Rewrite this sentence in a more [formal|friendly|concise|poetic] way: "The {job} couldn't find the {device}
    because of {problem}, so the {occasion} began late." ~
    Correct the grammar: "Yesterday the {job} have went to {town} for buying {food}, but he don't found nothing." ~
    Write a speech of about [one minute|200 words|two minutes] for a {occasion}. [Begin with a joke.|End with a
    toast.|] ~
    Write a song about {idea} with two verses and a chorus. ~
    Write a letter from a {person_kind} to [a younger self|an old friend|the mayor of {town}]. ~
    Invent a [game|holiday|superhero|proverb|machine] that has to do with a {thing}, and describe it. ~
    Suggest [five|ten] titles for a [book|film|podcast] about a {person_kind} and a {thing}. ~
    Come up with [three|five] ideas for a {occasion} with the theme "{thing}". ~
    Write a checklist for [a {occasion}|moving to {town}|opening a {business}]. ~
    What are common symptoms of {disease}, and when should someone see a doctor? ~
    How is {disease} treated, and can it be prevented? ~
    Give three reasons why {skill} is good for [children|older people|students|a {job}]. ~
    Write a review of [a restaurant that serves {food} and {food2}|a {device}|a film about a {person_kind}]. ~
    Explain the saying "[a stitch in time saves nine|many hands make light work|still waters run deep|the early bird
    catches the worm|actions speak louder than words|better late than never|don't judge a book by its cover|no pain,
    no gain|a watched pot never boils|when in Rome, do as the Romans do]" and use it in a story about a {job}. ~
    How has the work of a {job} changed in the last [twenty|fifty|hundred] years? ~
    What is the [best|cheapest|safest|fastest] way to travel from {town} to {town2}? What should I pack? ~
    Write a [Python|JavaScript|SQL|Bash] example that shows how {computing} works, and explain it. ~
    Design an experiment that shows {science} [at home|in a classroom|with simple materials]. ~
    What do people often get wrong about {science}? ~
    Summarise what you know about {history} in [three sentences|one paragraph|five bullet points]. ~
    Name [three|four|five] [inventions|books|discoveries|people] connected with {history} and say why each matters.
    """,
    "~",
)
SECOND_PARTS = listed(
    """
    Then write the same again for a child.; Answer in fewer than {8-20}0 words.; Use bullet points.; Begin every
    paragraph with a question.; After that, name one thing that most people don't know.; End with a one-sentence
    summary.; Then turn it into a short poem.; Please include an example from {country}.; Mention {food} at least
    once.; Write it in the first person.; Give the answer as a table.; Then list two further questions to think
    about.; Don't use the word "{colour}".; Keep the tone light and humorous.; Then translate the first sentence
    into French.; Then say what a critic might object.; Write for readers in {town}.; Number the steps.; Use exactly
    three paragraphs.; Finally, give it a title.; Explain every technical term.; Add a short dialogue.; Compare it
    with {idea}.
    """
)
OPENINGS = listed(
    "Hi!; Hello,; Please help me:; Quick question:; I'm a {job}.; I'm writing for my school newspaper.; Hey,"
)


def chat(rng: random.Random) -> str:
    """An open request, some in two parts."""
    writer = Writer(rng)
    text = writer.fill(rng.choice(CHAT)).strip()
    if (draw := rng.random()) < 0.45:
        parts = rng.sample(SECOND_PARTS, 2 if draw < 0.1 else 1)
        text = " ".join([text, *map(writer.fill, parts)])
    if rng.random() < 0.1:
        opening = writer.fill(rng.choice(OPENINGS))
        text = f"{opening} {text[0].lower() + text[1:] if opening.endswith(',') else text}"
    return text


# Word problems

MATH = listed(
    """
    {first} buys {3-12} notebooks at ${2-9} each and {2-8} pens at ${1-4} each. [He|She] pays with a $200 note. How
    much change does [he|she] get? ~
    A bakery makes {4-30} trays of rolls with {6-24} rolls on each. By noon {20-23} rolls are sold, and {3-9} more
    are given away. How many are left? ~
    {first} reads {10-40} pages a day. The book has {2-9}{10-99} pages. After {3-6} days, how many pages are left? ~
    A train leaves {town} with {80-240} passengers. At the first stop {10-60} get off and {5-50} get on, at the
    second twice as many get on as at the first and nobody gets off. How many passengers are on the train now? ~
    {first} earns ${12-40} an hour and works {5-9} hours on each of {3-6} days a week. [He|She] spends ${2-9}0 a
    week on food. How much does [he|she] have left after {2-6} weeks? ~
    A rectangular garden is {6-40} m long and {3-20} m wide. A fence costs ${4-25} a metre, and the gate costs
    ${40-180}. What does the fence with the gate cost? ~
    {first} has {3-9} times as many stamps as {first2}, who has {12-60}. {first3} has {5-40} fewer than {first}. How
    many stamps do the three have together? ~
    A tank holds {3-9}00 litres. A pump fills {12-40} litres a minute, and a leak loses {2-9}. How long does it take
    until the tank is full, if it starts with {20-95} litres? ~
    A {business} sold {20-90} items on Monday, {10-50} % more on Tuesday and half of Monday's number on Wednesday.
    How many items did it sell in the three days? ~
    {first} wants to buy a {device} that costs ${2-9}{10-99}. [He|She] has saved ${50-190} and gets ${10-40} a week.
    After how many weeks can [he|she] buy it? ~
    The price of a coat was ${60-240}. In a sale it is lowered by {10-60} %, and {first} has a voucher for ${5-20}.
    What does {first} pay? ~
    {first} drives {2-5} hours at {40-80} km/h and then {1-4} hours at {90-120} km/h. How far does [he|she] drive,
    and what is the average speed? ~
    A class of {18-34} pupils goes to a museum. A ticket costs ${4-12}; every tenth ticket is free. The bus costs
    ${90-240}. What does each pupil pay if the cost is shared equally? ~
    {first} plants {4-14} rows of [beans|tomatoes|pumpkins|peppers|potatoes] with {6-25} plants in each. One plant
    in {3-6} doesn't grow. Each of the others gives {2-9} kilos. How many kilos can [he|she] harvest? ~
    {first} is {2-4} times as old as {first2}. In {3-12} years {first2} will be {15-30}. How old is {first} now? ~
    A recipe for {2-6} people needs {100-450} grams of flour and {1-4} eggs. {first} cooks for {8-24} people. How
    much flour and how many eggs are needed? ~
    There are {12-60} {animal}s and {5-30} {animal2}s on a farm. A third of the {animal2}s are sold, and {3-20}
    {animal}s are born. How many animals are there then? ~
    {first}, {first2} and {first3} share ${3-9}00. {first} gets twice as much as {first2}, and {first3} gets
    ${10-90} more than {first2}. How much does each get? ~
    A phone plan costs ${10-30} a month with {2-9}00 minutes; each further minute costs {5-25} cents. In {month}
    {first} called for {900-990} minutes. What did [he|she] pay? ~
    A printer prints {8-30} pages a minute. {first} has to print {20-60} copies of a report of {12-48} pages. The
    printer pauses {2-5} minutes after every 500 pages. How long does it take? ~
    {first} runs {3-12} km on {day} and {1-4} km more on each following day. How far has [he|she] run after {4-7}
    days? ~
    A cinema has {12-30} rows of {14-28} seats. {60-95} % of the seats are taken, and a ticket costs ${7-15}. How
    much money does the cinema take in? ~
    {first} mixes {2-9} litres of juice with {1-6} litres of water and fills glasses of {150-350} ml. How many full
    glasses does that make? ~
    Two {job}s need {4-20} days for a task. How long would {3-8} of them need, if all work equally fast? ~
    A farmer packs {200-950} [apples|eggs|pears|melons|lemons] into boxes of {6-24}. Each full box sells for
    ${5-30}, and the box itself costs ${1-3}. How much does the farmer earn? ~
    {first} puts ${1-9}000 in a bank at {2-6} % interest a year. How much is in the account after {2-4} years, if
    nothing is taken out? ~
    {first} scored {60-95}, {60-95} and {60-95} points in three tests. How many points does [he|she] need in the
    fourth for an average of {75-92}?
    """,
    "~",
)


def math(rng: random.Random) -> str:
    """A word problem."""
    text = Writer(rng).fill(rng.choice(MATH))
    pronoun = rng.choice(("he", "she"))
    text = re.sub(r"\b([Hh]e|[Ss]he)\b", lambda found: pronoun.capitalize() if found[0][0] in "HS" else pronoun, text)
    return text + rng.choice(("",) * 5 + (" Explain step by step.", " Show your work.", " Think step by step."))


# Short questions: the patterns of each kind over the lines of its table

QA: list[tuple[str, str]] = [
    (
        "who played {0} in {1}; who plays {0} in {1}; which actor played {0} in the movie {1}; who was {0} in {1}",
        """Ellen Ripley|Alien; Rick Deckard|Blade Runner; Jack Dawson|Titanic; Maximus|Gladiator; Clarice
        Starling|The Silence of the Lambs; the Joker|The Dark Knight; Forrest|Forrest Gump; Neo|The Matrix;
        Trinity|The Matrix; Dorothy|The Wizard of Oz; Rick Blaine|Casablanca; Norman Bates|Psycho; Vito Corleone|The
        Godfather; Andy Dufresne|The Shawshank Redemption; Mia Wallace|Pulp Fiction; Marty McFly|Back to the Future;
        Ellie Sattler|Jurassic Park; Willy Wonka| Charlie and the Chocolate Factory; Truman|The Truman Show;
        Amélie|Amélie; Frodo|The Lord of the Rings; Gollum|The Lord of the Rings; Severus Snape|Harry Potter;
        Hermione|Harry Potter; Katniss|The Hunger Games; Tony Stark|Iron Man; Black Widow|The Avengers; Walter
        White|Breaking Bad; Jesse|Breaking Bad; Michael Scott|The Office; Dwight|The Office; Leslie Knope|Parks and
        Recreation; Sheldon|The Big Bang Theory; Phoebe|Friends; Kramer|Seinfeld; Tony|The Sopranos; Omar|The Wire;
        Don Draper|Mad Men; Eleven|Stranger Things; Arya Stark|Game of Thrones; Daenerys|Game of Thrones; Queen
        Elizabeth|The Crown; Sherlock|Sherlock; the fourth doctor|Doctor Who; Spock|Star Trek; Captain Picard|Star
        Trek; Buffy|Buffy the Vampire Slayer; Mulder|The X-Files; Dana Scully|The X-Files; Mary Poppins|Mary
        Poppins; Maria|The Sound of Music; Sandy|Grease; Rocky|Rocky; Indiana Jones|Raiders of the Lost Ark; Han
        Solo|Star Wars; Princess Leia|Star Wars; Darth Vader|Star Wars; Hannibal Lecter|Hannibal; Gru|Despicable Me;
        Elsa|Frozen; Woody|Toy Story; Simba|The Lion King; Shrek|Shrek; Barbie|Barbie; Furiosa|Mad Max Fury Road;
        Amy Dunne|Gone Girl; Elle Woods|Legally Blonde""",
    ),
    (
        """what is the capital of {0}; where is {0} located on the map; what language is spoken in {0}; what is the
        currency of {0}; what is the highest mountain in {0}; when did {0} become independent; what is {0} famous
        for; which countries border {0}; what is the population of {0}; who is the head of state in {0}; what is the
        longest river in {0}; what are the colours of the flag of {0}; when did women get the right to vote in {0};
        what is the climate like in {0}""",
        """Portugal; Kenya; Mongolia; Peru; Norway; Iceland; Vietnam; Morocco; Nepal; Bolivia; Senegal; Finland;
        Laos; Oman; Ecuador; Ghana; Slovenia; Bhutan; Jordan; Paraguay; Tunisia; Armenia; Belize; Chad; Cuba; Egypt;
        Fiji; Gabon; Haiti; India; Jamaica; Kazakhstan; Latvia; Malawi; Namibia; Panama; Qatar; Rwanda; Samoa;
        Thailand; Uganda; Uruguay; Yemen; Zambia; Argentina; Bangladesh; Cambodia; Denmark; Ethiopia; Georgia;
        Hungary; Indonesia; Japan; Lebanon; Mexico; New Zealand; Poland; Romania; Sri Lanka; Turkey; Ukraine;
        Zimbabwe; Australia; Canada; Colombia; Croatia; Greece""",
    ),
    (
        """who wrote {0}; who is the author of {0}; when was {0} first published; what is {0} about; where does {0}
        take place; who is the main character in {0}; how does {0} end; who are the main characters of {0}""",
        """Things Fall Apart; Middlemarch; One Hundred Years of Solitude; The Trial; Moby-Dick; Beloved; Dracula;
        Don Quixote; The Odyssey; War and Peace; Crime and Punishment; Wuthering Heights; The Great Gatsby; The Old
        Man and the Sea; Dune; The Handmaid's Tale; Brave New World; Fahrenheit 451; The Catcher in the Rye; Lord of
        the Flies; Invisible Man; Emma; The Grapes of Wrath; Little Women; Treasure Island; Heart of Darkness; The
        Picture of Dorian Gray; Hamlet; Macbeth; A Doll's House; The Cherry Orchard; Waiting for Godot; Death of a
        Salesman; The Crucible; The Name of the Rose; The Master and Margarita; Les Misérables; Madame Bovary;
        Candide; The Stranger; The Little Prince; Charlotte's Web; Anne of Green Gables; The Hobbit; Coraline; The
        Kite Runner; Life of Pi; The Book Thief; Never Let Me Go; Holes; The Road; Rebecca; Persuasion; Great
        Expectations; Frankenstein; Robinson Crusoe; Gulliver's Travels; The Iliad""",
    ),
    (
        "who sings {0}; who sang {0} first; who wrote the song {0}; when did {0} come out; what album is {0} on",
        """Bohemian Rhapsody; Imagine; Like a Rolling Stone; Respect; Billie Jean; Hotel California; Purple Rain;
        Dancing Queen; Superstition; Wonderwall; Smells Like Teen Spirit; Hey Jude; Space Oddity; No Woman No Cry;
        Stairway to Heaven; What a Wonderful World; Jolene; Rolling in the Deep; Hallelujah; Take On Me; Africa;
        Fast Car; Ring of Fire; Zombie; I Will Survive; Sweet Caroline; Dreams; Heroes; Born to Run; Losing My
        Religion; Creep; Yellow; Royals; Halo; Shape of You; Umbrella; Toxic; Every Breath You Take; Summertime;
        Georgia on My Mind; Blue Moon; Over the Rainbow; Killing Me Softly; Sound of Silence; Wish You Were Here;
        London Calling; Redemption Song; Seven Nation Army""",
    ),
    (
        """when did {0} happen; when was {0}; what year was {0}; what caused {0}; why was {0} important; who was
        involved in {0}; what was the result of {0}; how long did {0} last""",
        """the French Revolution; the Battle of Hastings; the moon landing; the fall of Constantinople; the Boston
        Tea Party; the Spanish Armada; the Great Fire of London; the Crimean War; the Boer War; the Russian
        Revolution; the Cuban Missile Crisis; the Battle of Trafalgar; the Norman conquest; the Wall Street Crash;
        the Chernobyl disaster; the Peace of Westphalia; the Battle of Gettysburg; the Irish potato famine; the
        Korean War; the Suez Crisis; the Battle of Midway; the Louisiana Purchase; the Prague Spring; the Long
        March; the Seven Years' War; the first Olympic Games; the Hundred Years' War; the Falklands War; the Treaty
        of Tordesillas; the Dust Bowl; the eruption of Krakatoa; the Dreyfus affair; the Battle of Waterloo; the
        Gunpowder Plot; the War of 1812; the Thirty Years' War; the Mexican-American War""",
    ),
    (
        "who invented {0}; when was {0} invented; where was {0} invented; how does {0} work; what was used before {0}",
        """the telephone; the steam engine; the light bulb; dynamite; the World Wide Web; the printing press;
        penicillin; the zipper; the barometer; the ballpoint pen; the jet engine; the thermometer; paper; gunpowder;
        the microscope; the bicycle; the sewing machine; vulcanised rubber; the telegraph; the transistor; the
        laser; the pacemaker; the lightning rod; the elevator; the cotton gin; barbed wire; the safety razor;
        photography; the phonograph; instant coffee; the helicopter; the submarine; contact lenses; the typewriter;
        the seismograph; velcro; the tin can; the traffic light""",
    ),
    (
        """when was {0} built; where is {0}; who designed {0}; how tall is {0}; why was {0} built; how old is {0};
        who owns {0}; what is {0} made of; how many people visit {0} each year""",
        """the Eiffel Tower; the Taj Mahal; the Sydney Opera House; the Golden Gate Bridge; the Colosseum; the
        Alhambra; Machu Picchu; Angkor Wat; the Statue of Liberty; Big Ben; the Great Wall of China; Petra;
        Stonehenge; the Brandenburg Gate; the Sagrada Família; the Empire State Building; the Parthenon;
        Neuschwanstein Castle; the Hagia Sophia; Mount Rushmore; the Burj Khalifa; the Tower Bridge; the Louvre; the
        Hoover Dam; the Kremlin; Chichen Itza; the Space Needle; the Leaning Tower of Pisa; Buckingham Palace; the
        Christ the Redeemer statue; the Hermitage; the Gateway Arch""",
    ),
    (
        """who won {0} in {1980-2019}; how often is {0} held; where was the first {0} held; how many teams take part
        in {0}; who has won {0} the most times; when does {0} start; how is the winner of {0} decided; where does
        {0} take place""",
        """the FIFA World Cup; the Tour de France; the Super Bowl; the Wimbledon final; the Rugby World Cup; the
        Masters; the Stanley Cup; the Davis Cup; the Champions League; the World Series; the Ryder Cup; the Boston
        Marathon; the Copa América; the Six Nations; the Cricket World Cup; the Indianapolis 500; the Kentucky
        Derby; the NBA finals; the Eurovision Song Contest; the Giro d'Italia; the Monaco Grand Prix; the FA Cup;
        the Ashes; the Vuelta; the US Open""",
    ),
    (
        """who discovered {0}; what is {0} used for; what is the symbol for {0}; where is {0} found; is {0} safe; what
        colour is {0}; what is the melting point of {0}; how did {0} get its name""",
        """helium; radium; oxygen; gold; uranium; neon; mercury; titanium; iodine; lithium; copper; phosphorus;
        silver; tungsten; chlorine; calcium; platinum; zinc; sulphur; carbon; nickel; cobalt; sodium; argon;
        plutonium; aluminium; lead; tin""",
    ),
    (
        """what is the function of the {0}; where is the {0} located in the body; what happens if the {0} is
        damaged; how big is the {0}; which doctor treats the {0}; what is the {0} connected to""",
        """liver; pancreas; spleen; cerebellum; aorta; thyroid gland; kidney; gallbladder; hypothalamus; retina;
        cochlea; femur; appendix; small intestine; pituitary gland; diaphragm; trachea; left ventricle; Achilles
        tendon; optic nerve; tibia; adrenal gland; bone marrow; cornea; clavicle; larynx; bladder; medulla;
        hippocampus; lymph node; inner ear""",
    ),
    (
        """what do {0} eat; where do {0} live; how long do {0} live; how many teeth do {0} have; are {0} mammals;
        how fast can {0} run or swim; what are baby {0} called; why do {0} migrate; how do {0} sleep; what hunts {0}""",
        """blue whales; hummingbirds; octopuses; red pandas; emperor penguins; koalas; sloths; komodo dragons; sea
        turtles; honey badgers; giraffes; bats; seahorses; salmon; wolves; snow leopards; camels; owls; beavers;
        platypuses; lobsters; monarch butterflies; orangutans; puffins; walruses; ostriches; jellyfish; hippos;
        chameleons; great white sharks""",
    ),
    (
        """where does the {0} river begin; how long is the {0}; which cities lie on the {0}; what sea does the {0}
        flow into; which countries does the {0} flow through""",
        """Danube; Nile; Mississippi; Mekong; Volga; Amazon; Rhine; Ganges; Yangtze; Zambezi; Congo; Seine; Murray;
        Orinoco; Niger; Elbe; Yukon; Tigris; Indus; Rhône; Colorado; Po; Vistula; Douro; Limpopo; Paraná; Loire;
        Dnieper; Tagus""",
    ),
    (
        """who is {0}; when was {0} born; where did {0} grow up; what is {0} known for; when did {0} die; who was
        {0} married to; where is {0} buried; what did {0} study; what prizes did {0} win""",
        """Marie Curie; Nelson Mandela; Frida Kahlo; Alan Turing; Florence Nightingale; Amelia Earhart; Simón
        Bolívar; Catherine the Great; Ludwig van Beethoven; Rosa Parks; Leonardo da Vinci; Cleopatra; Genghis Khan;
        Ada Lovelace; Charles Darwin; Albert Einstein; Louis Armstrong; Vincent van Gogh; Isaac Newton; Mahatma
        Gandhi; Joan of Arc; Galileo; Harriet Tubman; Ernest Shackleton; Rosalind Franklin; Wangari Maathai; Pelé;
        Hypatia; Johann Sebastian Bach; Emmeline Pankhurst; Akira Kurosawa; Maria Callas; Roald Amundsen; Neil
        Armstrong; Louis Pasteur; Marco Polo; Nikola Tesla; Billie Holiday""",
    ),
    (
        """what does {0} stand for; what does {0} mean; who uses the term {0}; when was {0} introduced""",
        """NASA; UNESCO; HTML; NATO; OPEC; CPU; ISBN; GPS; WHO; DNA; USB; MRI; VAT; FIFA; ASAP; PDF; HTTP; LED;
        RSVP; BBC; SCUBA; RADAR; LASER; IMF; GDP; PIN; CEO; SQL; URL; IKEA; RAM; JPEG; SOS; ATM; UEFA; ESA; UNICEF;
        CERN; OECD""",
    ),
    (
        """how many seasons of {0} are there; when did {0} first air; where was {0} filmed; who created {0}; when
        did the last episode of {0} air; who sings the theme song of {0}; is {0} based on a true story; what is {0}
        about""",
        """The West Wing; Lost; Downton Abbey; House; Cheers; Frasier; The Simpsons; Twin Peaks; MASH; Fawlty
        Towers; Chernobyl; Peaky Blinders; Succession; Fargo; The Good Place; Better Call Saul; Gilmore Girls;
        Dallas; Borgen; Dark; Narcos; Black Mirror; Community; True Detective; The Bear; Ted Lasso; Scrubs;
        Broadchurch; Luther; Futurama; Bones; Monk""",
    ),
    (
        """what is the difference between {0} and {1}; is {0} the same as {1}; which is bigger, {0} or {1}""",
        """a crocodile|an alligator; a violin|a viola; weather|climate; a comet|an asteroid; a virus|a bacterium;
        jam|marmalade; an alpaca|a llama; a hurricane|a tornado; a rabbit|a hare; baking soda|baking powder; a
        moth|a butterfly; mass|weight; England|Great Britain; a senator|a representative; lava|magma; a frog|a toad;
        a crow|a raven; sleet|hail; an island|a continent; a cello|a double bass; a seal|a sea lion; an atom|a
        molecule; a sonata|a symphony; a novel|a novella""",
    ),
    (
        """how many {0}; do you know how many {0}; exactly how many {0}""",
        """players are on a volleyball team; bones are in the human hand; moons does Jupiter have; strings does a
        cello have; time zones are there in Russia; keys are on a piano; states are in Australia; judges are on the
        supreme court; chambers does a heart have; sides does a dodecahedron have; symphonies did Mahler write;
        rings are on the Olympic flag; feet are in a mile; members are in the House of Lords; squares are on a
        chessboard; hearts does an octopus have; colours are in a rainbow; holes are on a golf course; planets are
        in the solar system; provinces are there in Canada; kings of England were named Henry; legs does a lobster
        have; acts are in a Shakespeare play; islands belong to Hawaii; litres of blood are in the human body;
        minutes is a rugby match; teaspoons are in a tablespoon; letters are in the Greek alphabet""",
    ),
]


def qa(rng: random.Random) -> str:
    """A short question, most of them without capitals, as people type them."""
    patterns, table = rng.choice(QA)
    pattern, entry = rng.choice(listed(patterns)), rng.choice(listed(table))
    question = Writer(rng).fill(re.sub(r"\{([01])\}", lambda found: entry.split("|")[int(found[1])].strip(), pattern))
    if rng.random() < 0.6:
        question = question.lower()
    question = question[:1].upper() + question[1:]
    return question + ("?" if rng.random() < 0.93 else "")


# German sentences: (articles, adjectives, nouns, verbs) by case, put together in frames

ARTICLES = {  # by case: der, ein and what comes after an adjective with each
    "nom": {"m": ("der", "ein", "e", "er"), "f": ("die", "eine", "e", "e"), "n": ("das", "ein", "e", "es")},
    "acc": {"m": ("den", "einen", "en", "en"), "f": ("die", "eine", "e", "e"), "n": ("das", "ein", "e", "es")},
    "dat": {"m": ("dem", "einem", "en", "en"), "f": ("der", "einer", "en", "en"), "n": ("dem", "einem", "en", "en")},
    "gen": {"m": ("des", "eines", "en", "en"), "f": ("der", "einer", "en", "en"), "n": ("des", "eines", "en", "en")},
}
PLURALS = {"nom": ("die", "e"), "acc": ("die", "e"), "dat": ("den", "en"), "gen": ("der", "er")}
ADJECTIVES = {
    "who": listed(
        """neu; deutsch; jung; erfahren; zuständig; französisch; bekannt; ehemalig; russisch; amerikanisch;
        britisch; örtlich; umstritten; amtierend; spanisch; polnisch; italienisch; japanisch; international;
        unabhängig; chinesisch"""
    ),
    "what": listed(
        """neu; wichtig; umstritten; geplant; groß; schwierig; gemeinsam; kostspielig; überraschend; umfangreich;
        langfristig; öffentlich; entscheidend; dringend; ungewöhnlich; alt; modern; ehrgeizig; einzig; weiter; erst;
        kostenlos; europäisch; streng"""
    ),
}
# Each domain: who acts, on what, and how. Verbs: prefix (or -), infinitive, present, past, participle. A ! marks nouns
# that take -en in other cases; p is a plural.
DOMAINS = [
    (
        """m Minister; f Ministerin; f Bundesregierung; n Parlament; f Opposition; f Kanzlerin; m Präsident!; m
        Abgeordnete!; f Partei; m Senat; m Bürgermeister; f Koalition; m Botschafter; p Grünen; p Sozialdemokraten;
        f Kommission; m Stadtrat; n Innenministerium; f Außenministerin; p Behörden; m Landtag; f
        Abgeordnetenkammer; m Ausschuss""",
        """n Gesetz; f Reform; m Haushalt; n Abkommen; m Vorschlag; f Steuer; p Sanktionen; m Vertrag; f
        Entscheidung; n Verbot; m Antrag; p Verhandlungen; f Regelung; m Plan; p Maßnahmen; n Programm; f Erhöhung;
        n Referendum; f Verordnung""",
        """- beschließen beschließt beschloss beschlossen; ab lehnen lehnt lehnte abgelehnt; - verteidigen
        verteidigt verteidigte verteidigt; an kündigen kündigt kündigte angekündigt; - kritisieren kritisiert
        kritisierte kritisiert; vor stellen stellt stellte vorgestellt; - unterstützen unterstützt unterstützte
        unterstützt; - verschieben verschiebt verschob verschoben; durch setzen setzt setzte durchgesetzt; - fordern
        fordert forderte gefordert; auf heben hebt hob aufgehoben; - prüfen prüft prüfte geprüft; - blockieren
        blockiert blockierte blockiert""",
    ),
    (
        """m Konzern; n Unternehmen; f Bank; m Hersteller; f Gewerkschaft; m Vorstand; f Zentralbank; p Händler; p
        Anleger; f Fluggesellschaft; m Autobauer; n Start-up; m Verband; f Versicherung; p Zulieferer; f Molkerei; m
        Energieversorger; f Handelskammer; m Betriebsrat; f Werft; m Onlinehändler; f Brauerei""",
        """n Werk; p Preise; m Umsatz; f Filiale; n Angebot; f Fabrik; p Arbeitsplätze; f Übernahme; f Produktion; p
        Löhne; m Tarifvertrag; n Geschäft; m Kredit; p Investitionen; f Prognose; m Standort; n Modell; p Kosten; f
        Anleihe; m Gewinn""",
        """- erhöhen erhöht erhöhte erhöht; ab bauen baut baute abgebaut; - senken senkt senkte gesenkt; - verkaufen
        verkauft verkaufte verkauft; aus bauen baut baute ausgebaut; - planen plant plante geplant; - verringern
        verringert verringerte verringert; - sichern sichert sicherte gesichert; - finanzieren finanziert
        finanzierte finanziert; - bewerten bewertet bewertete bewertet; - verlagern verlagert verlagerte verlagert;
        auf geben gibt gab aufgegeben; ein schränken schränkt schränkte eingeschränkt""",
    ),
    (
        """m Trainer; f Mannschaft; m Verein; m Stürmer; f Torhüterin; m Schiedsrichter; f Nationalmannschaft; m
        Meister; p Gäste; m Kapitän; f Läuferin; m Weltmeister; p Gastgeber; m Aufsteiger; f Schwimmerin; m
        Radprofi; m Verteidiger; p Fans; m Tabellenführer; f Olympiasiegerin; m Rekordmeister; n Team; m
        Sportdirektor""",
        """n Spiel; m Titel; m Vertrag; f Meisterschaft; n Turnier; m Pokal; f Niederlage; n Rennen; m Wettkampf;
        n Hinspiel; f Führung; m Rekord; m Sieg; f Medaille; n Halbfinale; f Qualifikation; f Saison; p Chancen""",
        """- gewinnen gewinnt gewann gewonnen; - verlieren verliert verlor verloren; - verpassen verpasst verpasste
        verpasst; - feiern feiert feierte gefeiert; - verlängern verlängert verlängerte verlängert; - beenden
        beendet beendete beendet; - verdienen verdient verdiente verdient; - genießen genießt genoss genossen; -
        bestreiten bestreitet bestritt bestritten; ab sagen sagt sagte abgesagt; vor bereiten bereitet bereitete
        vorbereitet; aus werten wertet wertete ausgewertet""",
    ),
    (
        """m Regisseur; f Schriftstellerin; n Museum; m Dirigent!; f Sängerin; n Orchester; m Verlag; f
        Schauspielerin; n Theater; m Künstler; f Jury; m Autor; p Besucher; f Galerie; m Komponist!; f Malerin; n
        Publikum; p Kritiker; m Fotograf!; f Bibliothek; m Sammler; f Stiftung""",
        """m Roman; n Bild; f Ausstellung; m Film; n Konzert; n Stück; m Preis; f Inszenierung; n Album; f Sammlung;
        n Festival; f Oper; p Fotografien; n Gemälde; n Denkmal; m Dokumentarfilm; f Lesung; n Drehbuch; p Briefe; f
        Skulptur""",
        """- zeigen zeigt zeigte gezeigt; - eröffnen eröffnet eröffnete eröffnet; - veröffentlichen veröffentlicht
        veröffentlichte veröffentlicht; - loben lobt lobte gelobt; - bewundern bewundert bewunderte bewundert; vor
        stellen stellt stellte vorgestellt; - erwerben erwirbt erwarb erworben; auf führen führt führte aufgeführt;
        - restaurieren restauriert restaurierte restauriert; - würdigen würdigt würdigte gewürdigt; aus zeichnen
        zeichnet zeichnete ausgezeichnet; - entdecken entdeckt entdeckte entdeckt""",
    ),
    (
        """m Forscher; f Wissenschaftlerin; n Institut; p Astronomen; f Universität; p Biologen; m Physiker; f
        Raumfahrtbehörde; p Ärzte; f Archäologin; p Ingenieure; m Mediziner; f Chemikerin; n Forschungsteam; p
        Geologen; m Informatiker; f Klinik; p Klimaforscher; m Astronaut!; n Labor; f Expertin; p Studenten""",
        """f Studie; m Impfstoff; n Verfahren; m Planet!; f Methode; n Medikament; n Experiment; f Theorie; p Daten;
        m Roboter; f Sonde; n Gen; m Satellit!; n Teleskop; p Proben; f Tierart; n Skelett; m Virus; f Therapie; p
        Messungen; n Fossil""",
        """- untersuchen untersucht untersuchte untersucht; - entwickeln entwickelt entwickelte entwickelt; - testen
        testet testete getestet; - beobachten beobachtet beobachtete beobachtet; vor stellen stellt stellte
        vorgestellt; - erforschen erforscht erforschte erforscht; aus werten wertet wertete ausgewertet; -
        beschreiben beschreibt beschrieb beschrieben; - finden findet fand gefunden; - vergleichen vergleicht
        verglich verglichen; nach weisen weist wies nachgewiesen; - analysieren analysiert analysierte analysiert""",
    ),
    (
        """f Polizei; f Feuerwehr; m Fahrer; f Staatsanwaltschaft; p Ermittler; m Richter; n Gericht; p
        Rettungskräfte; m Täter; f Zeugin; m Zeuge!; p Beamten; m Anwalt; f Bergwacht; p Einbrecher; f Küstenwache;
        m Angeklagte!; m Pilot!; p Helfer; f Radfahrerin; m Passant!; p Nachbarn; f Kommissarin; m Zoll""",
        """m Unfall; n Auto; m Brand; n Haus; p Spuren; f Straße; m Verdächtige!; n Urteil; f Brücke; n Fahrzeug; m
        Tunnel; f Waffe; p Ermittlungen; n Gebäude; m Lastwagen; f Wohnung; m Einbruch; n Boot; f Unfallstelle; p
        Hinweise; n Verfahren""",
        """- sperren sperrt sperrte gesperrt; - entdecken entdeckt entdeckte entdeckt; - durchsuchen durchsucht
        durchsuchte durchsucht; - melden meldet meldete gemeldet; - räumen räumt räumte geräumt; - verlassen
        verlässt verließ verlassen; - untersuchen untersucht untersuchte untersucht; - übersehen übersieht übersah
        übersehen; ein leiten leitet leitete eingeleitet; - beobachten beobachtet beobachtete beobachtet; ab sichern
        sichert sicherte abgesichert; - sichern sichert sicherte gesichert""",
    ),
    (
        """f Stadt; f Schule; m Lehrer; p Eltern; f Gemeinde; p Anwohner; m Bauer!; f Bahn; m Verkehrsbetrieb; p
        Schüler; f Kirche; n Krankenhaus; m Tierpark; p Vermieter; p Landwirte; f Bürgerinitiative; m Wirt; f
        Familie; m Hausarzt; n Jugendamt; p Touristen; m Förster; f Verwaltung; p Umweltschützer""",
        """n Schwimmbad; m Spielplatz; f Buslinie; m Radweg; p Wohnungen; n Fest; m Bahnhof; f Turnhalle; m Park; n
        Projekt; p Bäume; m Wald; f Baustelle; p Gebühren; m Neubau; n Rathaus; m Windpark; f Kita; n Angebot; p
        Fahrpläne; m Markt""",
        """- bauen baut baute gebaut; - planen plant plante geplant; - schließen schließt schloss geschlossen; -
        sanieren saniert sanierte saniert; - fordern fordert forderte gefordert; - nutzen nutzt nutzte genutzt; ab
        lehnen lehnt lehnte abgelehnt; - erweitern erweitert erweiterte erweitert; - retten rettet rettete gerettet;
        ein weihen weiht weihte eingeweiht; - besuchen besucht besuchte besucht; um gestalten gestaltet gestaltete
        umgestaltet""",
    ),
]
GERMAN_WHEN = listed(
    """am Montag; am Dienstag; am Mittwoch; am Donnerstagabend; am Freitag; am Wochenende; im Januar; im Frühjahr;
    im Sommer; im vergangenen Jahr; vor drei Wochen; gestern; in der Nacht zum Sonntag; seit Monaten; in diesem
    Herbst; kurz vor Mitternacht; am Nachmittag; nach langer Debatte; zum zweiten Mal; zu Beginn der Woche; trotz
    heftiger Kritik; überraschend; erneut; erstmals"""
)
GERMAN_SOON = listed(
    """am Montag; am Dienstag; am Mittwoch; im Januar; im Frühjahr; im kommenden Jahr; bald; morgen; in den nächsten
    Wochen; in der kommenden Woche; noch in diesem Herbst; bis zum Jahresende; ab Juli; vorerst; in Zukunft;
    spätestens im März"""
)
GERMAN_WHERE = listed(
    """in Berlin; in Hamburg; in München; in Köln; in Wien; in Zürich; in Brüssel; in Paris; in Stuttgart; in
    Leipzig; in der Schweiz; im Ausland; auf der Insel Rügen; an der Ostsee; in Bayern; in den Alpen; bei Hannover;
    in Südtirol; in Warschau; im Stadtzentrum; in Nordrhein-Westfalen; nahe der Grenze; in London; in Dresden; am
    Bodensee; in ganz Europa; in Rostock; im Schwarzwald"""
)
GERMAN_WHY = listed(
    """weil das Geld fehlt; weil die Nachfrage sinkt; obwohl viele Menschen dagegen protestieren; nachdem die
    Gespräche gescheitert waren; während draußen Hunderte warteten; damit die Kosten nicht weiter steigen; bevor die
    neue Saison beginnt; weil es zu wenig Personal gibt; obwohl die Zahlen besser ausfielen als erwartet; da sich
    die Lage kaum verändert hat; sobald die Genehmigung vorliegt; ohne die Öffentlichkeit zu informieren; um Zeit zu
    gewinnen; um das Vertrauen der Bürger zurückzugewinnen; wenn alle Beteiligten zustimmen; weil starker Regen den
    Boden aufgeweicht hatte; statt auf ein Ergebnis zu warten; nachdem ein Zeuge ausgesagt hatte; wie aus einem
    Bericht hervorgeht; falls bis zum Jahresende keine Lösung gefunden wird; obgleich Fachleute seit Jahren davor
    warnen; seit die Grenze wieder geöffnet ist; um den Verkehr in der Innenstadt zu entlasten; weil er sich am Knie
    verletzt hat; da die Mieten stark gestiegen sind; nachdem im Keller ein Feuer ausgebrochen war; solange niemand
    widerspricht"""
)
GERMAN_SAYING = listed(
    """sagte der Sprecher; teilte die Behörde mit; erklärte die Sprecherin {where}; berichtete eine Zeitung; hieß es
    {when}; so der Vorsitzende; schrieb {name} im Internet; betonte {name}; sagte {name} dem Sender; räumte die
    Geschäftsführerin ein"""
)
GERMAN_NAMES = listed(
    """Anna Berger; Thomas Wirth; Sabine Kuhn; Mehmet Aydin; Klara Vogt; Jürgen Pohl; Lena Sommer; Uwe Hartwig;
    Miriam Stein; Paul Reuter; Eva Lindner; Karl Brenner; Julia Seidel; Ali Demir; Petra Franke; Rolf Maurer; Nina
    Haas; Erik Jansen"""
)
GERMAN_FIXED = listed(
    """
    [Im Norden|Im Süden|An der Küste|In den Bergen|Im Osten] [bleibt es|ist es] [am Vormittag|am
    Abend|morgen|zunächst] [heiter und trocken|stark bewölkt|neblig|überwiegend sonnig|regnerisch und kühl], die
    Temperaturen [steigen|klettern] auf {4-34} Grad. ~
    Der Wetterdienst warnt vor [Sturmböen|Glatteis|Gewittern|Hochwasser|starkem Schneefall|großer Hitze] [{where}|im
    Bergland]. ~
    Nach dem [Sturm|Gewitter|Hochwasser|Erdbeben|Schneefall] waren {where} {2-9}00 [Haushalte|Häuser|Menschen] ohne
    Strom. ~
    Bei einem [Unfall|Brand|Zugunglück|Lawinenabgang|Zusammenstoß] {where} [sind|wurden] {when} {2-30} Menschen
    verletzt worden. ~
    Ein {18-89}-jähriger [Autofahrer|Wanderer|Motorradfahrer|Bergsteiger|Mann] ist {when} {where} [tödlich
    verunglückt|von der Straße abgekommen|schwer verletzt worden|aus dem Wasser gerettet worden]. ~
    Die [Zahl|Menge] der [Arbeitslosen|Geburten|Übernachtungen|Einbrüche|Elektroautos|Studierenden] ist {when} um
    {2-40} Prozent [gestiegen|gesunken|zurückgegangen|gewachsen]. ~
    Der [Dax|Euro|Ölpreis|Goldpreis|Strompreis] [stieg|fiel|sank] {when} um {0-4},{1-9} Prozent [auf den höchsten
    Stand seit {2-9} Jahren|und schloss damit so schwach wie lange nicht]. ~
    [In der {1-90}. Minute|Kurz vor der Pause|Nach einer Ecke|In der Verlängerung] [schoss|köpfte] {name} das
    {2-5}:{0-1}. ~
    {name} [gewann|siegte] {where} [vor|gegen] {name2} [und übernahm die Führung|mit {3-90} Sekunden Vorsprung|in
    drei Sätzen]. ~
    Jeder [dritte|vierte|fünfte|sechste|zehnte] [Deutsche|Befragte|Schüler|Rentner] [hat Angst vor der Zukunft|liest
    täglich Zeitung|spart zu wenig für das Alter|treibt kaum Sport|würde gern auf dem Land leben], wie eine Umfrage
    ergab. ~
    Wer {where} eine Wohnung sucht, [braucht viel Geduld|muss immer mehr bezahlen|findet oft monatelang nichts]. ~
    Es ist noch unklar, [wann|ob|warum|wie oft] {clause}. ~
    Man kann sich kaum vorstellen, wie [still|voll|teuer|schön] es {where} früher war. ~
    Seit {2-25} Jahren [lebt|arbeitet|unterrichtet|forscht] {name} {where}, doch an [die Sprache|das Essen|den
    Winter|die langen Wege] hat [sie|er] sich nie gewöhnt. ~
    Mehr als {2-90}.000 [Zuschauer|Besucher|Menschen|Demonstranten] kamen {when} {where} zusammen, um [an die Opfer
    zu erinnern|gegen die Kürzungen zu protestieren|das Jubiläum zu feiern|die Rückkehr der Mannschaft zu bejubeln].
    ~
    Das [Buch|Stück|Lied|Foto] erzählt von [einer Kindheit auf dem Land|zwei Brüdern im Krieg|dem Leben auf See|der
    ersten großen Liebe|einem Dorf, das im Stausee verschwand]. ~
    Wegen [Bauarbeiten|eines Streiks|einer Störung|eines Polizeieinsatzes] fallen {when} {where} [viele Züge|mehrere
    Flüge|die meisten Busse] aus. ~
    Je [länger der Streit dauert|höher die Zinsen steigen|älter die Anlagen werden], desto [größer wird der
    Schaden|lauter werden die Zweifel|schwieriger wird eine Einigung]. ~
    Weder {subject} noch {subject2} wollte sich {when} zu den Vorwürfen äußern. ~
    Wo einst [Kohle gefördert|Schiffe gebaut|Getreide gelagert] wurde, [entstehen heute Wohnungen|wachsen jetzt
    Birken und Gräser|sollen bald Künstler arbeiten].
    """,
    "~",
)
GERMAN_FRAMES = listed(
    """
    {When} {past} {subject} {object}{out}. ~ {Subject} {past} {when} {where} {object}{out}, {why}. ~
    {Subject} {hat} {when} {where} {object} {participle}. ~ {Subject} {wolle} {object} {soon} {infinitive}, {why}. ~
    {Object!} {werden} {when} {from} {participle}. ~ {Object!} {muss} {soon} {from} {participle} werden, {why}. ~
    {Subject} {present} {object}{out}, {why}. ~ {Subject} {kündigte} {where} an, {object} {zu}. ~
    Nach Angaben {genitive} {hat!} {subject2} {where} {object} {participle}. ~
    "{Subject} {sollte} {object} nicht {infinitive}", {saying}. ~ "Wir werden {object} {soon} {infinitive}",
    {saying}. ~
    {Subject} {habe} {object} bereits {when} {participle}, {saying}. ~
    {Subject}, {rel} {object} {participle} {hat}, {past2} {when} auch {object2}{out2}. ~
    {Object!}, {orel} {subject} {when} {participle} {hatte}, {wird!} nun {where} {participle2}. ~
    Dass {subject} {object} {past_end}, {reaction}. ~ Ob {subject} {object} {infinitive} {kann}, {doubt}. ~
    {Why}, {past} {subject} {object}{out}. ~ Mit {dative} {wolle} {subject} {object} {infinitive}. ~
    Es gelang {sdative} {when} nicht, {object} {zu}. ~ {Name}, {apposition} {genitive}, {past1} {when}
    {object}{out}. ~
    Obwohl {subject} {object} {past_end}, {past3} {subject2} {where} {object2}{out2}. ~
    {headline}
    """,
    "~",
)


class German:
    """Phrases of one domain for one sentence."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        who, what, verbs = (listed(part) for part in rng.choice(DOMAINS))
        self.subjects = rng.sample(who, 2)
        self.objects = rng.sample(what, 2)
        self.verbs = [verb.split() for verb in rng.sample(verbs, 2)]
        self.adjectives: dict[str, str] = {}
        self.definite: dict[str, bool] = {}

    def phrase(self, noun: str, case: str, kind: str) -> str:
        """A noun with article and perhaps an adjective, in a case."""
        gender, word = noun.split(" ", 1)
        weak, word = word.endswith("!"), word.rstrip("!")
        adjective = self.adjectives.setdefault(
            noun, self.rng.choice(ADJECTIVES[kind]) if self.rng.random() < 0.35 and not weak else ""
        )
        definite = self.definite.setdefault(noun, self.rng.random() < (0.75 if kind == "who" else 0.5))
        if gender == "p":
            article, ending = PLURALS[case]
            if case == "dat" and word[-1] not in "ns":
                word += "n"
            if definite:
                return f"{article} {adjective}en {word}" if adjective else f"{article} {word}"
            if case == "gen" and not adjective:  # a bare plural has no genitive
                return f"der {word}"
            return f"{adjective}{ending} {word}" if adjective else word
        row = ARTICLES[case][gender]
        if weak:
            definite = True
            if case != "nom":
                word += "n" if word.endswith(("e", "er")) else "en"
        elif case == "gen" and gender in "mn":
            word += "" if word == "Virus" else "es" if re.search(r"(s|ß|z|tz|x)$", word) else "s"
        article, ending = (row[0], row[2]) if definite else (row[1], row[3])
        return f"{article} {adjective}{ending} {word}" if adjective else f"{article} {word}"

    def sentence(self) -> str:
        """A sentence."""
        rng = self.rng
        if rng.random() < 0.3:
            return self.finish(rng.choice(GERMAN_FIXED))
        return self.finish(rng.choice(GERMAN_FRAMES))

    def finish(self, frame: str) -> str:
        """The frame with its slots filled."""
        writer = Writer(self.rng)
        writer.bound = self.slots()
        for name in ("when", "where", "why", "saying", "headline"):
            writer.bound[name] = writer.fill(writer.bound[name])
        for name in ("when", "why", "name", "subject", "object"):
            writer.bound[name.capitalize()] = writer.bound[name][:1].upper() + writer.bound[name][1:]
        text = writer.fill(re.sub(r"\{(\w+)!\}", r"{\1O}", frame))
        return text[:1].upper() + text[1:]

    def slots(self) -> dict[str, str]:
        """All that a frame may ask for."""
        rng = self.rng
        (subject, subject2), (thing, thing2), (verb, verb2) = self.subjects, self.objects, self.verbs
        plural, plural2, plural_thing = subject[0] == "p", subject2[0] == "p", thing[0] == "p"

        def finite(word: str, many: bool) -> str:
            return word if not many else word + ("n" if word.endswith("e") else "en")

        def split(word: list[str]) -> str:
            return f" {word[0]}" if word[0] != "-" else ""

        prefix = "" if verb[0] == "-" else verb[0]
        nominative = self.phrase(thing, "nom", "what")
        names = rng.sample(GERMAN_NAMES, 2)
        return {
            "subject": self.phrase(subject, "nom", "who"),
            "subject2": self.phrase(subject2, "nom", "who"),
            "sdative": self.phrase(subject, "dat", "who"),
            "genitive": self.phrase(subject, "gen", "who"),
            "from": "von " + self.phrase(subject, "dat", "who"),
            "object": self.phrase(thing, "acc", "what"),
            "object2": self.phrase(thing2, "acc", "what"),
            "dative": self.phrase(thing2, "dat", "what"),
            "ObjectO": nominative[:1].upper() + nominative[1:],
            "past": finite(verb[3], plural),
            "past1": verb[3],
            "past2": finite(verb2[3], plural),
            "past3": finite(verb2[3], plural2),
            "out": split(verb),
            "out2": split(verb2),
            "present": verb[1] if plural else verb[2],
            "past_end": prefix + finite(verb[3], plural),
            "participle": verb[4],
            "participle2": verb2[4],
            "infinitive": prefix + verb[1],
            "zu": f"{prefix}zu{verb[1]}" if prefix else f"zu {verb[1]}",
            "werden": "wurden" if plural_thing else "wurde",
            "wirdO": "werden" if plural_thing else "wird",
            "muss": rng.choice(("müssen", "sollen", "können") if plural_thing else ("muss", "soll", "kann")),
            "hat": "haben" if plural else "hat",
            "hatte": "hatten" if plural else "hatte",
            "hatO": "haben" if plural2 else "hat",
            "kann": "können" if plural else "kann",
            "sollte": "sollten" if plural else "sollte",
            "kündigte": "kündigten" if plural else "kündigte",
            "habe": "hätten" if plural else "habe",
            "wolle": "wollen" if plural else "will",
            "rel": {"m": "der", "f": "die", "n": "das", "p": "die"}[subject[0]],
            "orel": {"m": "den", "f": "die", "n": "das", "p": "die"}[thing[0]],
            "when": rng.choice(GERMAN_WHEN),
            "soon": rng.choice(GERMAN_SOON),
            "where": rng.choice(GERMAN_WHERE),
            "why": rng.choice(GERMAN_WHY),
            "saying": rng.choice(GERMAN_SAYING),
            "name": names[0],
            "name2": names[1],
            "clause": f"{self.phrase(subject, 'nom', 'who')} {self.phrase(thing, 'acc', 'what')} {prefix}{verb[1]} "
            + ("werden" if plural else "wird"),
            "apposition": rng.choice(
                listed("Sprecher; Sprecherin; ein enger Vertrauter; Vertreter; ein früherer Berater")
            ),
            "reaction": rng.choice(
                listed(
                    """hatte niemand erwartet; sorgt weiter für Diskussionen; überrascht selbst Fachleute; kam bei
                    vielen nicht gut an; gilt als wichtiges Signal; bestreitet inzwischen keiner mehr; freut vor
                    allem die Nachbarn"""
                )
            ),
            "doubt": rng.choice(
                listed(
                    """ist offen; wird sich erst im Herbst zeigen; bleibt umstritten; hängt vom Geld ab; weiß niemand;
                    entscheidet sich in den nächsten Tagen; ist nach Ansicht von Experten fraglich"""
                )
            ),
            "headline": self.headline(),
        }

    def headline(self) -> str:
        """A headline: no articles."""
        subject, thing, verb = self.subjects[0], self.objects[0], self.verbs[0]
        form = verb[1] if subject[0] == "p" else verb[2]
        noun, object_ = subject[2:].rstrip("!"), thing[2:]
        object_ = object_.rstrip("!") + (("n" if object_[-2] == "e" else "en") if object_.endswith("!") else "")
        out = f" {verb[0]}" if verb[0] != "-" else ""
        return f"{noun} {form} {object_} {{where}}{out}{self.rng.choice(('', ', {why}', ' - Kritik wächst'))}"


def translation(rng: random.Random) -> str:
    """A German sentence to translate; half of them with the punctuation set apart, as corpora have it."""
    text = German(rng).sentence()
    if rng.random() < 0.12:
        text += " " + German(rng).sentence()
    if rng.random() < 0.5:
        text = re.sub(r"(?<!\d)([,.:])(?=\s|$)", r" \1", text)
    if rng.random() < 0.94:
        return f"Translate German to English: {text}"
    return (
        rng.choice(("Please translate into English: ", "What does this mean in English? ", "German to English: "))
        + text
    )


# Articles: a skeleton has a lead and sentences of its own; those for any article are mixed in

NEWS = blocks(
    """
    {person}, a {job} from {town}, has won {money} in a lottery after buying a ticket [by mistake|on the way to
    work|for a friend]. ~ The winning numbers were drawn on {day} evening, but {surname} noticed only [a week|two
    days|a month] later. ~ "I read the numbers {3-9} times and then called my [sister|son|wife|husband|mother],"
    {surname} said. ~ The ticket had been lying [in a kitchen drawer|under the seat of a car|between two books|in an
    old coat] all the time. ~ {surname} plans to [repair the roof|travel to {country}|open a {business}|pay back a
    loan] and to give part of it to a hospital in {town}. ~ The shop that sold the ticket has had long queues since.

    A fire destroyed {count} homes in {region} on {day}, and people in three villages had to leave during the night. ~
    The flames spread quickly because of strong wind and a dry {month}. ~ {count} firefighters with {3-9} helicopters
    were still at work on {day2} morning. ~ Smoke could be seen as far as {town}, about {15-90} kilometres away. ~ The
    cause isn't known, but police are looking at [a broken power line|a campfire|sparks from a farm machine]. ~
    Schools along the {river} were turned into shelters with beds for {count} people. ~ Fire chief {person} said the
    line would hold if the wind didn't turn.

    The government of {country} has dropped its plan to [tax {food}|close {3-20} small hospitals|raise the retirement
    age|sell the state railway] after weeks of protests. ~ Prime Minister {person} said in parliament on {day} that
    the plan had been "a mistake made in a hurry". ~ The opposition called the step too late and asked for [new
    elections|an inquiry|the resignation of the finance minister]. ~ At least {count} people had marched through the
    capital at the weekend. ~ The finance ministry now has to find {money} elsewhere. ~ A survey in {month} found that
    {52-80} per cent were against it.

    {person} scored twice as {town} beat {town2} {2-5}-{0-1} in [the cup final|the last match of the season|a tense
    semi-final] on {day}. ~ The first goal came after {3-40} minutes, when the goalkeeper let a harmless shot slip
    through. ~ {town2} had the better chances before the break but hit the post {2-3} times. ~ Coach {person2} praised
    a team that "never stops running". ~ {surname}, {19-34}, had missed most of the spring with an injured
    [knee|ankle|shoulder]. ~ {count} fans had travelled by train, and many stayed in the stands long after the
    whistle. ~ {town} now meets {town3}.

    A court in {town} has sentenced {person}, {22-70}, to {2-15} years in prison for [stealing {count}
    paintings|selling forged tickets|robbing {3-9} jewellers|cheating pensioners out of their savings]. ~ The judge,
    {person2}, spoke of "a crime planned with patience and without pity". ~ Prosecutors had relied on [phone
    data|letters found in a garage|the statement of a former partner|video from a car park]. ~ The defence argued that
    {surname} had acted under pressure and will appeal. ~ Victims embraced in the corridor when the verdict was read.
    ~ The trial lasted {20-90} days and heard {count} witnesses. ~ {money} of the money has never been found.

    Researchers at the University of {town} have found that [people who sleep in the afternoon|children who grow up
    with a {animal}|adults who eat {food} every day|those who walk to work] are less likely to suffer from {disease}.
    ~ The study, in which {count} volunteers took part over {3-20} years, was published on {day}. ~ The risk fell by
    {8-45} per cent, though the authors warn that they can't prove a cause. ~ "It is a hint, not a prescription," said
    {person}, who led the work. ~ An expert who wasn't involved called the numbers [impressive|interesting but
    small|in need of a second study]. ~ The team now wants to repeat the test in {country}.

    The carmaker {last} Motors is calling back {count} vehicles because [a brake hose may leak|the doors can open
    while driving| a battery may overheat|the airbag may not work]. ~ {2-40} accidents have been reported, none of
    them fatal. ~ Owners will get a letter by the end of {month} and can have the part replaced in about {1-4} hours.
    ~ Shares fell {2-9} per cent in early trading on {day}. ~ Chief executive {person} apologised and said the
    supplier had been changed. ~ The regulator began its inquiry after a driver near {town} filmed the fault.

    A {animal} that escaped from a zoo in {town} {3-20} days ago has been caught [in a garden|on a golf course|behind
    a supermarket|in a school yard]. ~ A keeper lured it into a box with {food} while {count} people watched. ~ It had
    been seen in {3-8} places, among them a car park and the steps of a church. ~ "It's tired, hungry and rather
    proud," vet {person} said. ~ How it left its enclosure isn't clear; a tree that fell in a storm may have served as
    a bridge. ~ The zoo will give free entry on {day} to all who called with hints.

    The {river} has burst its banks after three days of rain, flooding {count} houses in {region}. ~ Soldiers carried
    sandbags through the night, and boats took people from their roofs. ~ The water stood at {4-9} metres on {day},
    the highest since {year}. ~ In {town} the bridge was closed and {count} homes had no power. ~ Mayor {person} said
    the damage would go beyond {money}. ~ Forecasters expect drier weather from {day2}. ~ A {job} told {agency} that
    she had saved only a photo album.

    {person}, the {writer_kind} whose {work} made {town} known around the world, has died at the age of {71-99}. ~ The
    family said that the end came peacefully at home, after a long illness. ~ Born in {town2} as the child of a {job},
    {surname} left school at {14-17} and worked as a {job2}. ~ The breakthrough came in {1951-1985} with a work that
    critics first ignored. ~ Colleagues remembered a generous friend who answered every letter by hand. ~ A memorial
    is planned for {month}. ~ {surname} is survived by {2-4} children and {3-9} grandchildren.

    A train from {town} to {town2} left the rails on {day} morning, injuring {count} passengers. ~ {3-9} of the
    carriages slid down a bank and came to rest against trees. ~ Rescuers freed the driver after {1-5} hours. ~
    Investigators have recovered the recorder and say the train wasn't too fast. ~ Passenger {person}, a {job},
    described a loud bang and then silence. ~ The line will stay closed for at least {2-9} days. ~ It was checked last
    in {month}.

    A school in {town} has [banned phones|started lessons at ten o'clock|replaced homework with gardening|introduced a
    day without screens], and marks have improved. ~ Head teacher {person} said she had expected complaints but
    received flowers. ~ Of the {count} pupils, {60-90} per cent said they felt better. ~ Some parents remain sceptical
    and have started a petition. ~ The ministry will look at the results in {month}. ~ A teachers' union warned
    against drawing quick conclusions. ~ Pupil {first2}, {10-17}, said the first week was "terrible, and then it was
    fine".

    Astronomers have discovered a planet that [rains glass|is hotter than many stars|circles two suns|may have an
    ocean], {20-900} light years from Earth. ~ It was found with a telescope in {country} that watched {count} stars.
    ~ A year there lasts only {2-40} days. ~ The light of its star dims by less than one per cent each time the planet
    passes. ~ {person} of the University of {town} called it "the strangest world we have seen". ~ A new space
    telescope is to look at its air in {2026-2032}. ~ Nobody expects life there.

    A ferry with {count} people on board ran aground off {town} late on {day}. ~ All were brought ashore by fishing
    boats and a coastguard helicopter. ~ The captain, {person}, reported a failure of the steering {10-40} minutes
    after leaving port. ~ {3-30} people were treated for shock and cold. ~ Divers are checking the hull, and booms
    have been laid against leaking oil. ~ The ship was built in {year} and passed inspection in {month}. ~ Passengers
    sang to keep the children calm.

    The {last} Museum in {town} has returned {3-90} objects to {country}, more than a century after they were taken. ~
    Among them are [a carved throne|bronze masks|a royal drum|painted manuscripts|a feathered crown]. ~ Director
    {person} called it "a beginning, not an end". ~ The pieces had been bought from a trader in {1870-1930}. ~
    Historians worked for {2-9} years to trace their path through {3-6} collections. ~ They will be shown in a new
    building from {month}. ~ Some critics had feared that the originals could be damaged on the way.

    {person} will leave as head of {last2} Bank after {2-12} years, following a row over [bonuses|risky loans|a failed
    merger| a leaked letter]. ~ The board accepted the resignation in a meeting that went on past midnight. ~
    {person3} takes over until a successor is found. ~ The bank lost {money} in the last quarter. ~ Analysts said the
    step had been expected. ~ Unions asked for a promise that none of the {count} branches would close. ~ {surname}
    will get no payment beyond the salary.

    Two hikers who had been missing in {region} for {2-9} days have been found alive. ~ {person}, {20-60}, and
    {person2}, a {job}, had lost the path in fog. ~ They drank melted snow and shared {food} and {food2}. ~ A search
    dog found their tent in a gorge on {day}. ~ {count} volunteers had combed the slopes. ~ Both are being treated for
    frostbite and are expected to go home by {day2}. ~ Rescue leader {person3} said that staying in one place had
    saved them.

    {country} and {country2} have signed an agreement on [fishing rights|gas pipelines|water from the {river}|visas
    for students|border trade] after {2-20} years of talks. ~ It was signed in {town} by the foreign ministers,
    {person} and {person2}. ~ Both parliaments still have to approve it. ~ Under the agreement {money} will be paid
    over {3-10} years. ~ Diplomats said the last open point was settled on {day} at four in the morning. ~
    Environmental groups said that the text was vague. ~ The two countries broke off relations for a time in {year}.

    A {11-17}-year-old from {town} has built a {device} that [runs on sunlight|costs less than a meal|helps blind
    people|warns of floods]. ~ {person} got the idea when the family's old one broke. ~ It was made from [a bicycle
    wheel and a fan|parts of toys|cardboard, wire and a phone]. ~ The invention won a prize of {money} in {country}. ~
    A company has offered to make {count} of them. ~ "First I have to pass my exams," {surname} said. ~ The teacher,
    {person2}, admitted to having doubted it.

    Doctors in {town} have [given a patient a new voice box|operated on a child before birth|used a robot to remove a
    tumour| restored the sight of a {job}] for the first time in {country}. ~ The operation took {6-23} hours and a
    team of {9-40}. ~ The patient, {person}, left the hospital after {2-9} weeks. ~ Surgeon {person2} had practised on
    models for {2-5} years. ~ About {count} people are waiting for such treatment. ~ Costs of {money} were met by a
    charity. ~ It's too early to say how long the effect will last.

    Supermarkets are running out of {food} because of [a poor harvest in {country}|a strike in the port of {town}|a
    disease of plants|a fire in a warehouse]. ~ Prices have gone up by {12-90} per cent since {month}. ~ Some shops
    now sell only {1-3} packs to each customer. ~ {person}, who runs a {business} in {town2}, has taken it off the
    menu. ~ Farmers say the weather was the worst since {year}. ~ The trade association expects deliveries to recover
    by {month2}. ~ Buyers are turning to {food2} instead.

    Police have arrested {3-20} people in {town} and seized [forged banknotes|stolen bicycles|{count} phones|rare
    birds| counterfeit medicine] worth {money}. ~ Officers searched {4-30} flats and a warehouse at dawn on {day}. ~
    The gang is thought to have been at work since {year}. ~ A tip came from a {job} who wondered about night-time
    deliveries. ~ Inspector {person} said more arrests would follow. ~ The suspects, aged {18-29} to {30-66}, are due
    in court on {day2}.

    {town} has been chosen to host the {sport} championships in {2026-2034}, ahead of {town2} and {town3}. ~ The vote
    was {20-40} to {5-19}. ~ The city promised to build no new stadium and to use the old harbour instead. ~ {money}
    has been set aside for trams and housing. ~ Mayor {person} danced on the stage. ~ Residents fear higher rents; a
    referendum had been won with only {51-56} per cent. ~ Champion {person2}, who grew up there, called it a dream.

    A strike by {job}s has brought {town} to a standstill. ~ The union wants {4-15} per cent more pay and [shorter
    shifts|more staff|safer equipment]. ~ Employers offered {1-3} per cent and a single payment of {money}. ~ Talks
    broke down on {day} after {5-20} hours. ~ Union leader {person} said members were "tired of applause". ~ Many
    residents show sympathy, though patience is thin. ~ A mediator is to meet both sides on {day2}. ~ It is the
    longest strike there since {year}.

    An app that [finds lost {animal}s|lends out tools|pairs lonely people for lunch|identifies birds by their song]
    has reached {2-9} million users. ~ It was written by {person} in a kitchen in {town}. ~ Investors from {country}
    have now put in {money}. ~ The firm has {5-90} staff and makes no profit yet. ~ Data protection officers asked
    what happens to the recordings. ~ {surname} said they are deleted after {7-60} days. ~ Rivals are working on
    similar services.

    A wreck found off the coast of {country} is that of the {last}, which sank in {1700-1910} with {count} people. ~
    Divers saw [cannons|bottles|a ship's bell|crates of porcelain] at a depth of {20-900} metres. ~ A robot took
    {count} pictures. ~ Archaeologist {person} searched for it for {5-30} years. ~ Letters in an archive in {town}
    showed that the ship had left its course. ~ The wreck will stay where it is, protected as a grave. ~ Treasure
    hunters had looked in the wrong bay.

    Farmers in {region} are fighting a plague of [mice|locusts|wild boar|beetles] that has eaten {20-80} per cent of
    the harvest. ~ {person}, who grows {food} near {town}, found {count} on one field. ~ A mild winter and few owls
    are blamed. ~ The ministry allowed a poison on {day}, against the advice of its own scientists. ~ Others try nets,
    drums and {animal}s. ~ Losses may reach {money}. ~ The last such plague was in {year}.

    Singer {person} has called off a tour of {12-60} concerts because of [a damaged voice|exhaustion|a broken leg|a
    dispute with the organiser]. ~ Fans in {town} learned of it an hour before the doors opened. ~ Tickets for {money}
    in all will be paid back. ~ "I owe you songs," the singer wrote. ~ Doctors advised {2-9} months of rest. ~ The
    album, recorded in {country}, had gone straight to number one. ~ New dates are to be named in {month}.

    A bridge over the {river} in {town} has reopened after {2-9} years of repairs that cost {money}. ~ It was closed
    when an engineer saw cracks {3-30} centimetres long. ~ {count} drivers a day had to take a detour. ~ The first to
    cross was {person}, {80-99}, who had done so as a child in {1930-1950}. ~ Work was delayed by [floods|a
    lawsuit|nesting birds|a wartime bomb]. ~ Cyclists have a lane of their own. ~ Shop owners hope that customers come
    back.

    Voters in {country} go to the polls on {day} in an election that may end {8-30} years of rule by one party. ~
    President {person} leads in the cities, challenger {person2} in the country. ~ Prices of {food} and fuel have been
    the main topics. ~ Some {2-40} million people may vote at {count} stations. ~ Observers reported long queues but
    few incidents. ~ In a debate the two argued about {idea}. ~ If nobody has more than half, there will be a second
    round in {month}.

    An earthquake of magnitude {5-7}.{0-9} shook {region} in {country} early on {day}. ~ At least {count} people were
    hurt, most of them by falling bricks. ~ It struck at a depth of {5-60} kilometres and was felt in {town}. ~
    Hospital patients were moved to tents. ~ {person}, a {job}, ran into the street with a child under each arm. ~
    Aftershocks may go on for weeks. ~ Old houses suffered most; a school built in {year} stood.

    A painting bought for {2-90} dollars at a flea market in {town} may be worth {money}. ~ {person} liked the frame
    and hung it [above the fridge|in the bathroom|in the garage]. ~ A guest, who works as an art dealer, took a second
    look. ~ Under the varnish was a signature and the date {1640-1910}. ~ Experts from {country} examined the pigments
    for {2-9} months. ~ One remains unconvinced and speaks of a good pupil. ~ The picture will be sold in {month}.

    {country}'s last [coal mine|sugar factory|typewriter maker|lighthouse keeper's station] closed on {day}, ending an
    era of {80-300} years. ~ {count} people worked there in the best times, {12-90} at the end. ~ Many wept when the
    bell rang. ~ {person}, a third-generation worker, kept the key. ~ The site near {town} is to become [a park|a
    museum|a solar plant]. ~ The state pays {money} for new training. ~ Prices had fallen for a decade.

    A cyclist has crossed {country} in {5-40} days without [sleeping in a bed|spending any money|using a map]. ~
    {person}, {19-75}, rode {2-9},{100-999} kilometres, from {town} to {town2}. ~ Strangers offered {food} and dry
    socks. ~ The hardest part was a storm in {region}. ~ A {animal} followed for two days. ~ The ride raised {money}
    for people with {disease}. ~ The old record was {41-60} days.

    Hackers have stolen the data of {count} customers of [a hotel chain|an airline|a hospital|a bank|a dating site]. ~
    Names and addresses were taken, but no card numbers, the firm said. ~ The attack began in {month} and went
    unnoticed for {10-90} days. ~ A group demanded {money}, which the company refused to pay. ~ {person}, an expert in
    {town}, called the passwords "a joke". ~ Customers should change theirs at once. ~ A fine of up to {money2} is
    possible.

    A village of {60-900} people in {region} has bought its own [pub|shop|island|forest|railway station]. ~ They
    collected {money} in {3-18} months. ~ Every share cost the same, and each owner has one vote. ~ {person}, a {job},
    had the idea at a {occasion}. ~ The former owner wanted to build flats. ~ Volunteers will run it on {day}s. ~
    Other places have asked for advice, among them {town} and {town2}.

    The airline {last} Air will stop flying between {town} and {town2} from {month}. ~ It blames [fuel prices|a lack
    of pilots| empty seats|new taxes]. ~ {count} jobs are at risk. ~ The airport's manager, {person}, heard of it from
    {agency}. ~ Passengers with tickets can travel by train or ask for their money. ~ A rival may take over {2-6} of
    the flights. ~ The company flew its first route in {year} with a single aircraft.

    Health officials have warned of a rise in cases of {disease} in {region}. ~ {count} patients were counted in
    {month}, twice as many as a year ago. ~ Doctors suspect [warm weather|long waiting lists|a lack of exercise|better
    tests]. ~ Clinics will open on {day}s as well. ~ {person}, a nurse in {town}, spoke of full corridors. ~ A
    campaign for {money} is to teach people the first signs. ~ Older people are advised to see their doctor.

    A film shot in {town} for only {money} has won the main prize at the festival of {town2}. ~ It tells of a {job}
    who [inherits a {thing}|befriends a {animal}|moves to {country}|refuses to speak]. ~ The jury praised "images that
    stay". ~ Director {person}, {24-60}, had sold a car to pay the actors. ~ Lead actress {person2} is a {job2} and
    had never been on camera. ~ The applause lasted {5-15} minutes. ~ Cinemas show it from {month}.

    Plans for a wind farm of {20-150} turbines off {town} have been approved. ~ It is to supply {count} homes from
    {2027-2035}. ~ Fishermen fear for their grounds and want {money}. ~ Energy minister {person} spoke of "a good day
    for the climate". ~ Bird experts asked for pauses in {month}. ~ The turbines are {180-280} metres high. ~ A court
    must still hear a case that was brought by a hotel owner.

    {town} is testing [buses without drivers|free breakfast in schools|trees on rooftops|a night mayor|streets without
    cars] for {3-24} months. ~ The council voted {21-40} to {8-20} for it. ~ First figures show {10-60} per cent less
    noise. ~ Taxi drivers protested with a slow convoy. ~ {person}, who uses a wheelchair, praised the idea. ~ The
    trial costs {money}, half of which comes from the state. ~ Delegations from {country} and {country2} have come to
    look.
    """
)
SLOTS["writer_kind"] = listed(
    "novelist; painter; composer; architect; photographer; poet; film director; playwright; sculptor"
)
SLOTS["work"] = listed(
    "novels; murals; portraits; songs; buildings; short films; poems; street scenes; children's books"
)
ANY_NEWS = listed(
    """
    "[We didn't expect this|It has been a difficult week|There is still a lot to do|People need clear answers|I have
    never seen anything like it]," said {person6}, a {job6} who lives nearby. ~
    {agency} reported first about the case. ~ A spokesperson declined to comment [on the details|before
    {day6}|further]. ~
    According to official figures, there were {count+} similar cases in {country6} last year. ~
    {person7}, who teaches at the University of {town6}, sees [a pattern|no reason for alarm|a warning|a rare
    chance] in it. ~
    "You can't [repair in a month what was neglected for years|plan for everything|please everybody|do this without
    money]," {surname7} added. ~
    In {year+} something similar happened in {town7}, with {count+} people involved. ~
    Local people have mixed feelings: some are proud, others [worried|angry|simply tired of cameras|afraid of higher
    prices]. ~
    Within hours, {count+} people had shared [a video|the news|a photo] of it online. ~
    Experts say that the next {2-9} weeks will be decisive. ~ Critics point out that {money+} had already been
    spent. ~
    The {job7} {person8}, {25-80}, had another view: "[Let's wait and see|We've managed before|Somebody has to
    begin|It's about respect]." ~
    A public meeting is to be held in {town8} on {day7}. ~ The deputy mayor promised [help|transparency|a
    report|quick decisions] "by the end of {month6}". ~
    For many families the matter is personal, because they have known each other for generations. ~
    The weather was [mild|stormy|rainy|foggy|calm] at the time, with temperatures of {2-35} degrees. ~
    Only last {month7} a report by {person9} had pointed to the problem. ~ That report, {30-400} pages long, was
    little read. ~
    Not everybody agrees, and {first9} {last9} of the citizens' association calls it "[theatre|a scandal|good luck|a
    first step|far too little]". ~ Neighbouring {country7} has chosen another way. ~ An inquiry will begin in
    {month8}. ~
    The region lives mainly from [tourism|farming|fishing|its port|a large brewery|its university], and jobs are
    scarce. ~
    A hotline has been set up and received {count+} calls on the first day. ~ The costs are put at {money+}. ~
    It isn't the first time: records from {1890-1980} describe much the same. ~ Children drew pictures and sent them
    in. ~
    By {day8} evening, candles and flowers stood in front of the town hall. ~ Insurance companies are watching
    closely. ~
    "In the end it is about trust," {surname8} said, "and trust needs time." ~ Two questions remain: who knew, and
    since when. ~
    The next step depends on [the weather|a vote on {day8}|the courts|money from abroad|volunteers]. ~
    A second expert, {person10} from {country8}, urged caution: the numbers cover only {3-11} months. ~
    Those who were there speak of [a quiet morning|a loud noise|great relief|a festive mood|confusion]. ~
    {town8}, a place of about {12-90},000 people, had made headlines last in {year+}. ~ Shops nearby stayed closed.
    ~
    Since then, [letters|offers|donations|reporters] have come from as far away as {country9}. ~ More is to be known
    by {month9}. ~
    A photographer of {agency} was on the spot by chance. ~ The decision may be [challenged|reviewed|copied
    elsewhere].
    """,
    "~",
)

# Encyclopaedia entries: the kind's patterns; the first begins the entry, those with a question mark are asked about it

ENTRIES = blocks(
    """
    {new} is a town in [northern|southern|eastern|western|central] {country}, on the {river}, with {3-90},{100-999}
    inhabitants. ~ It was first mentioned in {850-1400} in a letter of a [bishop|merchant|king|monk]. ~ Until
    {1700-1899} it lived from [salt|wool|silver|glass|timber|amber]. ~ A fire in {1500-1750} destroyed all but {3-40}
    houses. ~ The [town hall|cathedral| castle|mill] was rebuilt by {person} in the style of the time. ~ The railway
    reached it in {1845-1899}. ~ Today its largest employers are a [paper mill|maker of
    pumps|university|hospital|brewery] and a {food} factory. ~ Its football club plays in {colour} and white. ~ Every
    {month} there is a festival in honour of the {animal} in its coat of arms. ~ When was {new} first mentioned? ~
    What did the people of {new} live from? ~ Which river is {new} on? ~ What happened in {new} in the fire? ~ Who are
    the largest employers in {new}?

    The {new} is a river in {country}, {90-900} kilometres long, that rises in the {shire} mountains. ~ It flows
    through {town} and {town2} and into the [sea|{river2}|Lake {last}]. ~ Its name comes from an old word for
    "[cold|winding|bright|fish| stone]". ~ {4-30} bridges cross it, the oldest of them from {1200-1850}. ~ Floods in
    {1900-1999} led to the building of {2-9} dams. ~ [Trout|Pike|Salmon|Eels] live in its upper course, and {animal}s
    on its banks. ~ Barges carried [coal|grain| timber|stone] on it until {1930-1975}. ~ The upper valley has been a
    nature reserve since {1960-2015}. ~ How long is the river {new}? ~ Where does the {new} rise? ~ What does the name
    {new} mean? ~ Why were dams built on the {new}? ~ Which animals live in and along the {new}?

    {person} ({1801-1860}-{1870-1930}) was a {nationality}
    [chemist|astronomer|botanist|mathematician|geologist|physician], best known for work on [the age of rocks|colour
    vision|comets|plant diseases|the speed of sound|fevers]. ~ {surname} was born in {town} as the {ordinal} child of
    a {job}. ~ At {16-24} {surname} went to {town2} to study under {person2}. ~ An expedition to {country} brought
    back {count+} samples. ~ The main work, in {2-9} volumes, appeared in {1861-1900}. ~ Many colleagues doubted it
    until an experiment in {1901-1925} proved it right. ~ {surname} refused a title and lived in a small house with
    {3-12} {animal}s. ~ A crater on the moon bears the name. ~ What was {person} best known for? ~ Where was {person}
    born? ~ Why did colleagues doubt {surname}? ~ Who taught {person}? ~ What did {person} bring back from {country}?

    The {new} {animal} is a species found only in [the forests|the wetlands|the highlands|the islands] of {country}. ~
    It is {12-90} centimetres long and has {colour} [stripes|spots|ears|patches]. ~ It feeds on
    [roots|insects|fruit|small fish|leaves| eggs] and is active [at night|at dawn|by day]. ~ Females bear {1-6} young
    after {30-200} days. ~ It was described in {1780-1930} by {person}. ~ About {count+} are left in the wild. ~ The
    main threats are [logging|hunting|roads|dogs] and the loss of [water|trees|open land]. ~ A breeding programme in
    {town} began in {1975-2015}. ~ Its call can be heard {1-5} kilometres away. ~ What does the {new} {animal} eat? ~
    Why is the {new} {animal} threatened? ~ Where does the {new} {animal} live? ~ How many young does the {new}
    {animal} have? ~ Who first described the {new} {animal}?

    The Battle of {new} was fought on {1-28} {month} {1200-1870} between {country} and {country2}. ~ General {person}
    led {5-60},000 men, {person2} about half as many. ~ It began in fog and lasted until dusk. ~ A [hidden ford|sudden
    storm|false retreat| burning bridge] decided it. ~ {count+} soldiers fell. ~ The peace signed in {town} {2-9}
    months later moved the border to the {river}. ~ A chapel stands on the field today. ~ Historians argue about
    whether {surname2} ever got the order to wait. ~ Songs about it were still sung {80-300} years later. ~ Who fought
    in the Battle of {new}? ~ What decided the Battle of {new}? ~ When was the Battle of {new}? ~ What changed after
    the Battle of {new}? ~ Who led the armies at {new}?

    "{new}" is a novel by {person}, published in {1890-2015}. ~ It follows a {job} who returns to {town} and finds [a
    diary|a sister|a debt|a grave]. ~ The story is told by {2-5} voices. ~ {surname} wrote it in {3-40} weeks while
    working as a {job2}. ~ {3-30} publishers turned it down. ~ It has sold {count+} copies and was translated into
    {12-50} languages. ~ Critics praised its treatment of {idea}, but found the ending [weak|cruel|too neat]. ~ A film
    with {person2} followed in {2001-2022}. ~ The title comes from a [folk song|street sign|dream|line in a letter]. ~
    Who wrote "{new}"? ~ What is the novel "{new}" about? ~ How many publishers turned "{new}" down? ~ Where does the
    title "{new}" come from? ~ What did critics say about "{new}"?

    {new} Bridge is a [suspension|stone arch|steel arch|cable-stayed|covered wooden] bridge over the {river} in
    {town}. ~ It is {120-990} metres long and {9-40} wide. ~ It was designed by {person} and opened in {1780-2005}. ~
    Before, a ferry made the crossing in {10-40} minutes. ~ {3-40} workers died during its building. ~ It was closed
    in {2006-2020} because of rust. ~ Its {colour} paint needs {20-90} tonnes each time. ~ About {count+} vehicles use
    it daily. ~ It appears on a coin of {country}. ~ Who designed {new} Bridge? ~ How did people cross the {river}
    before {new} Bridge? ~ How long is {new} Bridge? ~ Why was {new} Bridge closed?

    {new} is a festival held each {month} in {country}, mainly around {town}. ~ It marks [the first rain|the end of
    the harvest| a victory of {1600-1800}|the return of the herds|the longest night]. ~ People wear {colour} and carry
    [lanterns|branches| bells|masks] through the streets. ~ Families eat {food} with {food2}, and a place is left free
    for a stranger. ~ On the {ordinal} day there is a race of [boats|horses|children on stilts|carts]. ~ It was banned
    from {1880-1930} to {1940-1980}. ~ Since {1990-2015} it has drawn {count+} visitors. ~ Its oldest song has {12-90}
    verses. ~ What does the festival {new} mark? ~ What do people eat at {new}? ~ When is {new} held? ~ What happens
    on the {ordinal} day of {new}?

    The {new} Company was a maker of {device}s in {town}, founded in {1860-1960} by {person}. ~ It began in a
    [shed|cellar|former stable|boat] with {3-12} workers. ~ Its first success was a model that [folded|floated|needed
    no oil|weighed half as much]. ~ By {1961-1979} it employed {count+} people in {3-9} countries. ~ A strike in
    {1968-1984} lasted {5-30} weeks. ~ It was sold to {last2} Industries for {money}. ~ Cheaper goods from abroad
    brought losses, and it closed in {1985-2012}. ~ Collectors pay high prices for its early pieces. ~ The building
    now houses [artists|a school|flats|a museum]. ~ What did the {new} Company make? ~ Why did the {new} Company
    close? ~ Who founded the {new} Company? ~ What is in the building of the {new} Company today?

    {new} is a dish from {country}, made of {food}, {food2} and [onions|nuts|lemon|cabbage|ginger]. ~ It is [baked in
    leaves| fried in butter|steamed for hours|eaten cold|cooked over coals]. ~
    [Sailors|Shepherds|Monks|Miners|Weavers] are said to have invented it in the {17-19}th century. ~ In {town} it is
    eaten only on {day}s. ~ A cookbook of {1750-1910} gives {4-20} ways to make it. ~ A richer form with {food3} is
    served at weddings. ~ It became known abroad through the cook {person}. ~ A protected name since {1995-2020}, it
    may be sold as {new} only if made by hand. ~ What is {new} made of? ~ Who is said to have invented {new}? ~ How is
    {new} cooked? ~ When may a dish be sold as {new}?

    Mount {new} is a [volcano|peak|table mountain] of {1-6},{100-999} metres in {region}. ~ It was first climbed in
    {1786-1960} by {person} and {person2}. ~ Glaciers cover {2-40} square kilometres of it and have shrunk by half
    since {1900-1980}. ~ Its rock is mostly [granite|basalt|limestone|slate]. ~ A hut at {2-3},{100-900} metres has
    {20-120} beds. ~ Local people call it "[the old woman|the chair|the sleeping {animal}|the broken tooth]". ~
    {12-150} climbers have died there. ~ A cable car was planned in {1961-1999} but never built. ~ Who first climbed
    Mount {new}? ~ What do local people call Mount {new}? ~ How high is Mount {new}? ~ What has happened to the
    glaciers of Mount {new}?

    {new} is a language spoken by about {count+} people in {country} and {country2}. ~ It has {3-14} vowels and
    {12-40} consonants. ~ Verbs stand at the [beginning|end] of a sentence, and nouns have {2-15} cases. ~ Until
    {1800-1950} it wasn't written down; the priest {person} made its alphabet. ~ Its nearest relative is spoken on the
    {river}. ~ It has {4-30} words for [snow|rain| cattle|cousins|wind]. ~ Schools have taught it since {1970-2015}. ~
    Young people often mix it with [English|French|Spanish| Russian]. ~ A radio station broadcasts {2-12} hours a day.
    ~ How many people speak {new}? ~ Who made the alphabet of {new}? ~ Where do verbs stand in {new}? ~ Where is {new}
    spoken?

    The {new} Railway ran {20-300} kilometres from {town} to {town2}. ~ It was built from {1850-1880} to {1881-1910}
    to carry [copper| {food}|tourists|pilgrims|marble]. ~ Engineer {person} chose a narrow gauge to save money. ~
    {5-60} tunnels were cut by hand. ~ In winter [sheep|snow|ice|landslides] stopped it for weeks. ~ It never paid a
    dividend. ~ A crash near {shire} in {1911-1940} killed {3-40} people. ~ It closed in {1941-1975}, and its track is
    now a path for cyclists. ~ One engine, painted {colour}, stands in front of a school. ~ Why was the {new} Railway
    built? ~ What is left of the {new} Railway? ~ Why was a narrow gauge chosen for the {new} Railway? ~ When did the
    {new} Railway close?

    {new} is a [board|card|ball|dice] game for {2-8} players from {country}. ~ Each player begins with {3-20}
    [stones|cards|pieces| sticks] in one colour. ~ The aim is to [surround the other's king|lose all cards|cross the
    field first|make rows of {3-5}]. ~ A game takes {10-90} minutes. ~ It was brought to {country2} by
    [sailors|students|soldiers] in {1890-1970}. ~ The first tournament, in {town}, was won by {person}. ~ A rule of
    {1971-2010} forbids the same move {2-4} times in a row. ~ Computers have beaten the best players since
    {1995-2019}. ~ What is the aim of {new}? ~ How many can play {new}? ~ Which rule of {new} was added later? ~ Where
    does {new} come from?

    {new} is a [mineral|glassy stone|soft ore] of {colour} colour found near {town} in {country}. ~ It was named after
    {person}, a {job} who brought it to a museum in {1790-1950}. ~ It is harder than [glass|chalk|steel|quartz] and
    melts at {4-29}00 degrees. ~ It contains [iron|copper|calcium|lead] and sulphur. ~ Early people used it for
    [beads|paint|arrowheads|fire-making]. ~ Today it serves in [glazes|batteries|lenses|cement]. ~ Crystals of more
    than {2-9} centimetres are rare. ~ The largest weighs {2-90} kilos and is kept in {town2}. ~ What is {new} used
    for? ~ Who was {new} named after? ~ Where is {new} found? ~ What did early people do with {new}?
    """
)
SLOTS["new"] = listed(
    "[Al|Ber|Cas|Dor|El|Fal|Gan|Hel|Ir|Jas|Kor|Lam|Mar|Nor|Os|Pel|Quin|Ros|Sal|Tor|Ul|Ven|Wes|Yar|Zen]"
    "[a|e|i|o|en|ar|is|or|and|el|u|er][dale|mont|nia|ra|bury|vik|sta|lin|more|tane|voll|gar|zo|mir|beck|na|ton]"
)
SLOTS["nationality"] = listed(
    "Scottish; Danish; Polish; Portuguese; Canadian; Dutch; Hungarian; Swiss; Chilean; Japanese; Irish"
)
SLOTS["ordinal"] = listed("second; third; fourth; fifth; sixth; seventh; ninth")

# True passages on common subjects, each with a question
FACTS = [
    tuple(line.strip() for line in block.split("?", 1))
    for block in re.split(
        r"\n\s*\n",
        """
    What do bees need pollen and nectar for? Honey bees live in colonies of tens of thousands of workers, one queen
    and, in summer, some hundreds of drones. Workers collect nectar, which is turned into honey and stored as food
    for the winter, and pollen, which feeds the larvae. A worker that has found a good source of food tells the
    others by a dance on the comb: its angle shows the direction from the sun, and its length the distance. By
    carrying pollen from flower to flower, bees help many crops to bear fruit.

    How does a lighthouse help ships? Lighthouses are towers with a strong light that warn sailors of rocks and show
    the way into harbours. Each has its own pattern of flashes, listed in charts, so that a captain can tell which
    one is in sight. Early ones burned wood or coal. In the 1820s Augustin Fresnel invented a lens of many rings
    that sends most of the light out in one beam. Keepers once lived beside the lamp and wound its clockwork by
    hand; today nearly all lighthouses work by themselves.

    Why did the potato become important in Europe? The potato was first grown in the Andes, in what is now Peru and
    Bolivia, some thousands of years ago. Spanish ships brought it to Europe in the sixteenth century, where it was
    at first looked at with mistrust. It gives more food from a field than grain does and grows in poor soil, and so
    it came to feed a fast-growing population. In the 1840s a disease destroyed the harvest in Ireland for several
    years; about a million people died and more than a million left.

    What made paper cheaper in the nineteenth century? Paper was invented in China about two thousand years ago and
    was made of plant fibres and rags. The craft spread west through Central Asia to the Arab world, and reached
    Europe in the Middle Ages. For centuries sheets were formed by hand, one by one. Around 1800 a machine was built
    that made an endless web, and from the middle of the century on wood took the place of rags. Newspapers and
    books became so cheap that many more people could buy them.

    How do vaccines protect against a disease? A vaccine shows the immune system a harmless form or a part of a
    germ. The body answers with antibodies and with memory cells that stay for years. When the real germ comes
    later, the answer is so quick that the illness doesn't break out or stays mild. Edward Jenner tested the first
    in 1796, using cowpox against smallpox. After a worldwide campaign smallpox was declared wiped out in 1980. If
    enough people are immune, those who can't be vaccinated are protected too.

    What causes the tides? Tides are the regular rise and fall of the sea. They are caused by the pull of the Moon
    and, to a lesser degree, of the Sun, together with the rotation of the Earth. Most coasts have two high and two
    low waters a day. When Sun, Moon and Earth stand in line, at new and full moon, the range is largest and one
    speaks of spring tides; when they form a right angle, of neap tides. In the Bay of Fundy in Canada the
    difference can be more than fifteen metres.

    Why did the Romans build aqueducts? Roman cities were supplied with water by aqueducts, channels that led it
    from springs over many kilometres with a small, steady fall. Most of their length was underground; only valleys
    were crossed on arches, such as those of the Pont du Gard in France. The water fed public fountains and baths,
    and the houses of the rich. The city of Rome had eleven of them in the third century. Settling tanks removed
    sand, and officials watched over leaks and theft.

    How is chocolate made from cocoa beans? Cocoa trees grow near the equator, and their pods hang directly on the
    trunk. The beans in them are left to ferment for some days, which takes away bitterness, and are dried in the
    sun. Factories roast and grind them to a paste of cocoa mass and cocoa butter, and add sugar and sometimes milk.
    The mass is stirred for hours, a step called conching, until it is smooth. Careful cooling gives the butter the
    crystal form in which chocolate shines and snaps.

    What is a glacier, and how does it move? A glacier forms where more snow falls in winter than melts in summer.
    Over the years the snow is pressed to ice, and when this is thick enough it begins to flow downhill under its
    own weight. It slides on meltwater and also bends within. On its way it grinds the rock and carries stones,
    which it leaves as moraines. Valleys shaped by glaciers are U-shaped. Most glaciers of the world have been
    losing ice for decades, which raises the level of the sea.

    Why is the Great Barrier Reef in danger? The Great Barrier Reef lies off the coast of Queensland in Australia
    and is more than two thousand kilometres long. It was built by tiny animals, the corals, which live together
    with algae that give them food and colour. If the water stays too warm for weeks, corals push out the algae and
    turn white; many then die. Storms, polluted rivers and a starfish that eats corals do further harm. Over a
    thousand species of fish live on the reef, and millions of tourists visit it.

    What does the heart do in one beat? The human heart is a muscle the size of a fist with four chambers. The right
    half takes in blood from the body and pumps it to the lungs, the left half takes in blood rich in oxygen and
    sends it through the aorta to all organs. Valves keep it from flowing back. An electrical signal from the sinus
    node starts each beat, some seventy times a minute at rest. The muscle itself is fed by the coronary arteries;
    if one of them is blocked, a heart attack follows.

    How did the printing press change Europe? Around 1450 Johannes Gutenberg in Mainz combined movable metal type,
    an oily ink and a press like those for wine. Pages could now be set quickly and printed in hundreds of copies.
    By 1500 there were presses in more than two hundred towns and millions of books. Prices fell, more people
    learned to read, and ideas of scholars and reformers spread faster than any authority could stop them. Spelling
    became more uniform, and maps and tables could be compared from place to place.
    """.strip(),
    )
]


def written(rng: random.Random, patterns: tuple[str, ...], target: int) -> str:
    """A news article of about that many words."""
    writer = Writer(rng)
    lead, *own = patterns
    rng.shuffle(own)
    text = [writer.sentence(lead)]
    more = rng.sample(ANY_NEWS, len(ANY_NEWS))
    size = len(text[0].split())
    while size < target and (own or more):
        pattern = own.pop() if own and (rng.random() < 0.6 or not more) else more.pop()
        text.append(writer.sentence(pattern))
        size += len(text[-1].split())
    if target - size > 60:  # a second report
        patterns = rng.choice([each for each in NEWS if each != patterns])
        text += [rng.choice(("In other news:", "Elsewhere:", "Also today:")), written(rng, patterns, target - size)]
    if rng.random() < 0.25:
        text[0] = f"{writer.fill('{town}').upper()} - {text[0]}"
    return " ".join(text)


def entry(rng: random.Random) -> tuple[str, list[str]]:
    """An encyclopaedia entry and questions about it."""
    writer = Writer(rng)
    patterns = rng.choice(ENTRIES)
    questions = [each for each in patterns if each.endswith("?")]
    first, *rest = [each for each in patterns if not each.endswith("?")]
    head, tail = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    text = writer.sentence(first)
    rest = rng.sample(head, len(head)) + rng.sample(tail, len(tail))
    text += " " + " ".join(writer.sentence(each) for each in rest[: rng.randint(5, 9)])
    return text, [writer.sentence(each) for each in questions]


def prose(text: str) -> list[str]:
    """The paragraphs of a documentation text that are plain prose."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        flat = " ".join(block.split())
        plain = not re.search(r">>>| -- |::=|\*\*\*|===|---|^\s*[-*|+.]|\|", block) and not lines[0].startswith("    ")
        if plain and flat.endswith(".") and len(flat.split()) >= 25:
            found.append(re.sub(r"`+|\*(?=\w)|(?<=\w)\*", "", flat))
    return found


def documentation() -> list[tuple[str, str]]:
    """Subjects and passages from the documentation that comes with the interpreter."""
    sources = [(name.replace("-", " "), text) for name, text in sorted(topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            text = ast.get_docstring(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):
            continue
        sources.append((f"the module {path.stem}", text or ""))
    passages = []
    for name, text in sources:
        chunk: list[str] = []
        for paragraph in [*prose(text), None]:
            if chunk and (paragraph is None or sum(len(each.split()) for each in [*chunk, paragraph]) > 330):
                if sum(len(each.split()) for each in chunk) >= 60:
                    passages.append((name, " ".join(chunk)))
                chunk = []
            if paragraph:
                chunk.append(paragraph)
    return passages


def given(files: list[Path]) -> list[str]:
    """The texts of files: a JSONL line with "text" each, or all of a plain file, in parts of some hundred words."""
    texts = []
    for path in files:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            texts += [str(json.loads(line)["text"]) for line in content.splitlines() if line.strip()]
        else:
            texts.append(content)
    parts = []
    for text in texts:
        words: list[str] = []
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            words += sentence.split()
            if len(words) >= 350:
                parts.append(" ".join(words[:650]))
                words = []
        if len(words) >= 60:
            parts.append(" ".join(words))
    return parts


class Passages:
    """Texts to summarise or to ask about; each given or documentation passage serves once for either."""

    def __init__(self, files: list[Path], rng: random.Random) -> None:
        self.documents, self.given = documentation(), given(files)
        self.queues = {
            use: (rng.sample(self.documents, len(self.documents)), rng.sample(self.given, len(self.given)))
            for use in ("summarization", "rag")
        }

    def summarization(self, rng: random.Random) -> str:
        """An article to summarise."""
        documents, own = self.queues["summarization"]
        draw = rng.random()
        if own and draw < 0.4:
            text = own.pop()
        elif documents and draw > 0.88:
            text = documents.pop()[1]
        else:
            text = written(rng, rng.choice(NEWS), rng.randint(190, 660))
        text = cut(text, 820)
        if rng.random() < 0.92:
            return f"Summarize: {text}"
        return (
            Writer(rng).fill(
                "[Summarize this in [two|three] sentences:|Give a short summary.\n\n|TL;DR for this text:|"
                "What are the key points of this article?\n\n]"
            )
            + f" {text}"
        )

    def rag(self, rng: random.Random) -> str:
        """Some passages and a question about one of them."""
        documents, own = self.queues["rag"]
        target = rng.randint(280, 560)
        texts: list[str] = []
        questions: list[str] = []
        while sum(len(each.split()) for each in texts) < target:
            draw = rng.random()
            if documents and draw < 0.06:
                name, text = documents.pop()
                questions += [f"What does the text say about {name}?", f"Explain {name} in a few sentences."]
            elif own and draw < 0.25:
                text = own.pop()
                about = " ".join(text.split()[:6]).strip(",.;:")
                questions += [f'What is the main point of the passage that begins with "{about}"?']
            elif draw < 0.34:
                asked, text = rng.choice([each for each in FACTS if each[1] not in texts] or FACTS)
                questions.append(f"{asked}?")
                text = " ".join(text.split())
            else:
                text, asked_here = entry(rng)
                questions += asked_here
            if text not in texts:
                texts.append(cut(text, 330))
        question = rng.choice(questions)
        if rng.random() < 0.35:
            question = question[:1] + question[1:].lower()
        rng.shuffle(texts)
        if rng.random() < 0.9:
            return "\n".join([" ".join(texts), question])
        return "\n\n".join(
            [rng.choice(("Answer with the help of these passages.", "Use the text below.")), *texts, question]
        )


def cut(text: str, most: int) -> str:
    """At most that many words."""
    return " ".join(text.split(" ")[:most])


# Functions to complete: the results in their examples come from running the reference

NAMES_OF = {
    "List[int]": listed("numbers; values; nums; items; data; xs; scores; readings; heights; amounts"),
    "List[str]": listed("words; names; strings; items; tokens; lines; labels; parts; keys"),
    "str": listed("text; s; string; sentence; line; word; phrase; message; source"),
    "int": listed("n; number; value; amount; x; num"),
    "Dict[str, int]": listed("counts; table; scores; stock; prices; ages; mapping"),
    "List[List[int]]": listed("grid; matrix; rows; table; board"),
    "List[Tuple[int, int]]": listed("pairs; intervals; ranges; points; edges"),
}
WORDS = listed(
    "apple; river; stone; cloud; Paper; moon; train; Garden; bee; lamp; tiger; cup; salt; wind; Oak; ring; piano; level"
)
# name(s) | types of the arguments | type of the result | description | reference, of k and the arguments
# fmt: off
CODE: list[tuple[str, str, str, str, Callable[..., Any]]] = [
    ("sum_of_multiples add_multiples", "List[int]", "int", "the sum of all numbers in {a} that are divisible by {k}",
     lambda k, a: sum(x for x in a if x % k == 0)),
    ("count_above count_greater", "List[int]", "int", "how many numbers in {a} are greater than {k}",
     lambda k, a: sum(x > k for x in a)),
    ("every_kth take_every", "List[int]", "List[int]",
     "every element of {a} at an index divisible by {k}",
     lambda k, a: a[::k]),
    ("chunks split_into_chunks", "List[int]", "List[List[int]]",
     "{a} cut into lists of {k} elements; the last may be shorter",
     lambda k, a: [a[i : i + k] for i in range(0, len(a), k)]),
    ("moving_sums window_sums", "List[int]", "List[int]", "the sums of all runs of {k} neighbouring elements of {a}",
     lambda k, a: [sum(a[i : i + k]) for i in range(len(a) - k + 1)]),
    ("running_total cumulative_sum", "List[int]", "List[int]", "the running totals of {a}, each one multiplied by {k}",
     lambda k, a: [k * sum(a[: i + 1]) for i in range(len(a))]),
    ("differences step_sizes", "List[int]", "List[int]",
     "the differences between elements of {a} that are {k} places apart",
     lambda k, a: [y - x for x, y in zip(a, a[k:])]),  # noqa: B905
    ("largest_k top_values", "List[int]", "List[int]", "the {k} largest numbers of {a}, the largest first",
     lambda k, a: sorted(a, reverse=True)[:k]),
    ("clamp_all limit_values", "List[int]", "List[int]", "{a} with every number greater than {k} replaced by {k}",
     lambda k, a: [min(x, k) for x in a]),
    ("index_of_first first_above", "List[int]", "int",
     "the index of the first number in {a} above {k}, or -1 if there is none",
     lambda k, a: next((i for i, x in enumerate(a) if x > k), -1)),
    ("last_index find_last", "List[int]", "int", "the last index at which {k} stands in {a}, or -1 if it doesn't",
     lambda k, a: max((i for i, x in enumerate(a) if x == k), default=-1)),
    ("group_by_remainder by_remainder", "List[int]", "Dict[int, List[int]]",
     "a dictionary from each remainder after division by {k} to the numbers of {a} that have it",
     lambda k, a: {r: [x for x in a if x % k == r] for r in dict.fromkeys(x % k for x in a)}),
    ("partition_at split_by_pivot", "List[int]", "Tuple[List[int], List[int]]",
     "two lists: the numbers of {a} below {k}, and the others, both in their order",
     lambda k, a: ([x for x in a if x < k], [x for x in a if x >= k])),
    ("longest_rise longest_increasing_run", "List[int]", "int",
     "the length of the longest run of {a} where each number exceeds the one before by less than {k} and more than 0",
     lambda k, a: max(sum(1 for _ in _run(a, i, k)) for i in range(len(a)))),
    ("alternate_sum signed_sum", "List[int]", "int", "{k} times the sum of {a} with signs that alternate, plus first",
     lambda k, a: k * sum(x if i % 2 == 0 else -x for i, x in enumerate(a))),
    ("peaks local_maxima", "List[int]", "List[int]", "the numbers in {a} that exceed both neighbours by at least {k}",
     lambda k, a: [y for x, y, z in zip(a, a[1:], a[2:]) if y - x >= k and y - z >= k]),  # noqa: B905
    ("count_pairs pairs_with_difference", "List[int]", "int",
     "the number of pairs of positions in {a} whose values differ by {k}",
     lambda k, a: sum(abs(x - y) == k for i, x in enumerate(a) for y in a[i + 1 :])),
    ("repeat_each stretch", "List[int]", "List[int]", "{a} with each element repeated {k} times",
     lambda k, a: [x for x in a for _ in range(k)]),
    ("drop_every remove_every", "List[int]", "List[int]", "{a} without each {k}th element, counted from 1",
     lambda k, a: [x for i, x in enumerate(a, 1) if i % k]),
    ("mode_count frequent_values", "List[int]", "List[int]", "the sorted values that stand in {a} at least {k} times",
     lambda k, a: sorted({x for x in a if a.count(x) >= k})),
    ("bucket_counts histogram_of", "List[int]", "Dict[int, int]",
     "how many numbers of {a} fall in each bucket of width {k}, keyed by the bucket's first number",
     lambda k, a: dict(sorted(Counter(x // k * k for x in a).items()))),
    ("rotate_words shift_list", "List[str]", "List[str]", "{a} with its first {k} elements moved to the end",
     lambda k, a: a[k % len(a) :] + a[: k % len(a)]),
    ("long_words words_longer_than", "List[str]", "List[str]",
     "the strings of {a} with more than {k} characters, sorted",
     lambda k, a: sorted(x for x in a if len(x) > k)),
    ("initials first_letters", "List[str]", "str", "the first {k} letters of each string in {a}, joined by dots",
     lambda k, a: ".".join(x[:k] for x in a)),
    ("index_by_length group_lengths", "List[str]", "Dict[int, List[str]]",
     "a dictionary from lengths to the strings of {a} of that length, leaving out those shorter than {k}",
     lambda k, a: {n: [x for x in a if len(x) == n] for n in sorted({len(x) for x in a}) if n >= k}),
    ("numbered enumerate_lines", "List[str]", "List[str]",
     "{a} with each string numbered as in '{k}. text', counting from {k}",
     lambda k, a: [f"{i}. {x}" for i, x in enumerate(a, k)]),
    ("pad_columns align_left", "List[str]", "List[str]",
     "the strings of {a} filled with dots on the right to the longest one's length plus {k}",
     lambda k, a: [x.ljust(max(map(len, a)) + k, ".") for x in a]),
    ("abbreviate shorten_all", "List[str]", "List[str]",
     "{a} with all strings longer than {k} cut to {k} characters and followed by '~'",
     lambda k, a: [x if len(x) <= k else x[:k] + "~" for x in a]),
    ("to_acronym make_tag", "List[str]", "str", "the first letters of at most {k} strings of {a}, in upper case",
     lambda k, a: "".join(x[0] for x in a[:k]).upper()),
    ("position_lookup positions", "List[str]", "Dict[str, int]",
     "a dictionary from the strings of {a} in lower case to their positions, counting from {k}",
     lambda k, a: {x.lower(): i for i, x in enumerate(a, k)}),
    ("wrap_text break_lines", "str", "List[str]", "the pieces of {a} of {k} characters each, the last perhaps shorter",
     lambda k, a: [a[i : i + k] for i in range(0, len(a), k)]),
    ("truncate_words first_words", "str", "str", "the first {k} words of {a}", lambda k, a: " ".join(a.split()[:k])),
    ("hide_tail mask_text", "str", "str", "{a} with all but its first {k} characters replaced by '*'",
     lambda k, a: a[:k] + "*" * len(a[k:])),
    ("capitalize_nth upper_every", "str", "str", "{a} with each character at an index divisible by {k} in upper case",
     lambda k, a: "".join(c.upper() if i % k == 0 else c for i, c in enumerate(a))),
    ("count_long_words number_of_long_words", "str", "int", "the number of words in {a} that have at least {k} letters",
     lambda k, a: sum(len(w) >= k for w in a.split())),
    ("letter_positions where_is", "str", "List[int]",
     "the indices of the letter '{c}' in {a}, in either case, each plus {k}",
     lambda k, a, c: [i + k for i, x in enumerate(a.lower()) if x == c]),
    ("replace_letter swap_letter", "str", "str", "{a} with each '{c}' replaced by the digit {k}",
     lambda k, a, c: a.replace(c, str(k))),
    ("split_at_letter cut_at", "str", "List[str]", "the parts of {a} between the letters '{c}', at most {k} of them",
     lambda k, a, c: a.split(c)[:k]),
    ("compress run_lengths", "str", "List[Tuple[str, int]]",
     "the runs of equal characters in {a} that have a length of at most {k}, as pairs of character and length",
     lambda k, a: [(m[1], len(m[0])) for m in re.finditer(r"(.)\1*", a) if len(m[0]) <= k]),
    ("slug make_slug", "str", "str", "at most {k} words of {a}, in lower case and joined by hyphens",
     lambda k, a: "-".join(a.lower().split()[:k])),
    ("word_lengths length_table", "str", "Dict[str, int]",
     "the lengths of the words of {a} that have more than {k} letters",
     lambda k, a: {w: len(w) for w in a.split() if len(w) > k}),
    ("reverse_long_words flip_words", "str", "str", "{a} with the words of more than {k} letters reversed",
     lambda k, a: " ".join(w[::-1] if len(w) > k else w for w in a.split())),
    ("digits_in_base base_digits", "int", "List[int]", "the digits of {a} in base {k}, the most significant first",
     lambda k, a: _digits(a, k)),
    ("multiples_up_to list_multiples", "int", "List[int]", "the first {a} positive multiples of {k}",
     lambda k, a: [k * i for i in range(1, a + 1)]),
    ("countdown count_down_by", "int", "List[int]", "the numbers from {a} down to 0 in steps of {k}",
     lambda k, a: list(range(a, -1, -k))),
    ("divide_evenly fair_shares", "int", "List[int]",
     "{k} numbers that differ by at most 1 and sum to {a}, the largest first",
     lambda k, a: [a // k + (i < a % k) for i in range(k)]),
    ("power_sum sum_of_powers", "int", "int", "the sum of the numbers from 1 to {a}, each to the power of {k}",
     lambda k, a: sum(i**k for i in range(1, a + 1))),
    ("halving_steps steps_to_zero", "int", "int", "how often {a} can be divided by {k}, rounding down, until it is 0",
     lambda k, a: len(_digits(a, k))),
    ("round_to_multiple round_up_to", "int", "int", "the smallest multiple of {k} that isn't less than {a}",
     lambda k, a: -(-a // k) * k),
    ("format_number group_digits", "int", "str", "{a} written with {k} leading zeros", lambda k, a: "0" * k + str(a)),
    ("to_clock format_minutes", "int", "str", "the time {a} times {k} minutes after midnight, as 'HH:MM'",
     lambda k, a: f"{a * k // 60 % 24:02d}:{a * k % 60:02d}"),
    ("best_keys keys_above", "Dict[str, int]", "List[str]", "the keys of {a} whose values are at least {k}, sorted",
     lambda k, a: sorted(x for x, y in a.items() if y >= k)),
    ("scale_values multiply_values", "Dict[str, int]", "Dict[str, int]",
     "a new dictionary with all values of {a} times {k}",
     lambda k, a: {x: y * k for x, y in a.items()}),
    ("invert swap_keys", "Dict[str, int]", "Dict[int, List[str]]",
     "a dictionary from the values of {a} below {k} to sorted keys",
     lambda k, a: {v: sorted(x for x in a if a[x] == v) for v in dict.fromkeys(a.values()) if v < k}),
    ("total_of_short sum_short_keys", "Dict[str, int]", "int",
     "the sum of the values of {a} whose keys have at most {k} letters",
     lambda k, a: sum(y for x, y in a.items() if len(x) <= k)),
    ("ranking rank_keys", "Dict[str, int]", "List[str]",
     "the {k} keys of {a} with the largest values; ties in alphabetical order",
     lambda k, a: sorted(a, key=lambda x: (-a[x], x))[:k]),
    ("render_table as_lines", "Dict[str, int]", "List[str]", "lines like 'key=value' for the entries of {a} above {k}",
     lambda k, a: [f"{x}={y}" for x, y in a.items() if y > k]),
    ("row_sums sums_by_row", "List[List[int]]", "List[int]", "the sum of each row of {a}, plus {k}",
     lambda k, a: [sum(row) + k for row in a]),
    ("transpose flip_grid", "List[List[int]]", "List[List[int]]", "the transpose of {a} with {k} added to each number",
     lambda k, a: [[x + k for x in column] for column in zip(*a)]),  # noqa: B905
    ("count_cells cells_equal", "List[List[int]]", "int", "the number of cells of {a} that hold at least {k}",
     lambda k, a: sum(x >= k for row in a for x in row)),
    ("flatten_rows flatten", "List[List[int]]", "List[int]", "the numbers of {a} that aren't {k}, row by row",
     lambda k, a: [x for row in a for x in row if x != k]),
    ("border_sum edge_total", "List[List[int]]", "int", "{k} times the sum of the first and the last column of {a}",
     lambda k, a: k * sum(row[0] + row[-1] for row in a)),
    ("column_maxima column_tops", "List[List[int]]", "List[int]",
     "the largest number of each column of {a}, or {k} if that is more",
     lambda k, a: [max(*column, k) for column in zip(*a)]),  # noqa: B905
    ("total_length covered", "List[Tuple[int, int]]", "int",
     "the sum of the lengths of the {a} that are longer than {k}",
     lambda k, a: sum(y - x for x, y in a if y - x > k)),
    ("containing pairs_around", "List[Tuple[int, int]]", "List[Tuple[int, int]]",
     "the pairs in {a} with first <= {k} <= second",
     lambda k, a: [(x, y) for x, y in a if x <= k <= y]),
    ("sort_by_span order_by_distance", "List[Tuple[int, int]]", "List[Tuple[int, int]]",
     "{a} sorted by how far the middle of each pair is from {k}",
     lambda k, a: sorted(a, key=lambda p: abs(p[0] + p[1] - 2 * k))),
    ("merge_ranges join_intervals", "List[Tuple[int, int]]", "List[Tuple[int, int]]",
     "the sorted {a} with those merged whose gap is smaller than {k}", lambda k, a: _merged(k, a)),
]
# fmt: on


def _run(a: list[int], start: int, k: int) -> Iterator[int]:
    yield a[start]
    for x, y in zip(a[start:], a[start + 1 :]):  # noqa: B905
        if not 0 < y - x < k:
            return
        yield y


def _digits(a: int, k: int) -> list[int]:
    return [*_digits(a // k, k), a % k] if a else []


def _merged(k: int, a: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(a):
        if found and first - found[-1][1] < k:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def example(rng: random.Random, kind: str) -> Any:
    """A value of a type, as an example."""
    size = rng.randint(3, 7)
    top = rng.choice((9, 12, 20))
    pairs = sorted((x, x + rng.randint(1, 9)) for x in rng.sample(range(1, 30), 3))
    return {
        "List[int]": lambda: [rng.randint(1, top) for _ in range(size)],
        "List[str]": lambda: rng.sample(WORDS, min(size, 5)),
        "str": lambda: " ".join(rng.sample(WORDS, min(size, 4))),
        "int": lambda: rng.randint(5, 40),
        "Dict[str, int]": lambda: {word: rng.randint(1, top) for word in rng.sample(WORDS, 4)},
        "List[List[int]]": lambda: [[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(2, 3))],
        "List[Tuple[int, int]]": lambda: rng.sample(pairs, 3),
    }[kind]()


def code_complete(rng: random.Random) -> str:
    """A Python function to complete, with examples."""
    names, kind, result, description, reference = rng.choice(CODE)
    k, letter, argument = rng.randint(2, 7), rng.choice("aeinorst"), rng.choice(NAMES_OF[kind])
    free = "{k}" in description and rng.random() < 0.5  # k as an argument of its own
    second = rng.choice([each for each in ("k", "limit", "step", "size", "m") if each != argument])
    original = description
    description = description.replace("each {k}th", "every {k}th")
    text = description.format(a=argument, k=second if free else k, c=letter)
    text = rng.choice(
        ("Return {}.", "Compute {}.", "Find {}.", "Given {a}, return {}.", "Determine {}.", "Return {}.")
    ).format(
        text,
        a=argument if kind not in ("int", "str") else f"{'an integer' if kind == 'int' else 'a string'} {argument}",
    )
    if free and kind == "int":
        text = text.replace(f"{second}th", f"{second}-th")
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > 74:
            lines.append(line)
            line = ""
        line += (" " if line else "") + word
    lines.append(line)
    name = rng.choice(names.split())
    signature = f"def {name}({argument}: {kind}{f', {second}: int' if free else ''}) -> {result}:"
    for number in range(rng.randint(2, 4)):
        value = example(rng, kind)
        while "{c}" in original and letter not in value:
            value = example(rng, kind)
        at = k if not free or number == 0 else rng.randint(2, 7)
        outcome = reference(at, value, letter) if reference.__code__.co_argcount == 3 else reference(at, value)
        lines += [f">>> {name}({value!r}{f', {at}' if free else ''})", repr(outcome)]
    if rng.random() < 0.25:
        lines.insert(len(lines) - lines[::-1].index(line), "")
    space = rng.choice((" ", "", " "))
    body = "\n".join(f"    {each}" if each else "" for each in lines).lstrip()
    typing = [each for each in ("Dict", "List", "Tuple") if each in signature]
    imports = f"from typing import {', '.join(typing)}" if typing else rng.choice(("", "", "import math"))
    if rng.random() < 0.2:
        signature = signature.replace("List[", "list[").replace("Dict[", "dict[").replace("Tuple[", "tuple[")
        imports = ""
    head = imports + "\n\n\n" if imports else "\n\n"
    source = f'{head}{signature}\n    """{space}{body}\n    """'
    return f"Complete this Python function. Answer with the code only.\n\n```python\n{source}\n```"


# All together


def generate(count: int, seed: int, files: list[Path]) -> list[dict[str, Any]]:
    """That many prompts in mixed order."""
    rng = random.Random(seed)
    passages = Passages(files, rng)
    makers: dict[str, Callable[[random.Random], str]] = {
        "chat": chat,
        "summarization": passages.summarization,
        "translation": translation,
        "qa": qa,
        "rag": passages.rag,
        "code_complete": code_complete,
        "math": math,
    }
    wanted = {category: int(count * share) for category, share in SHARES.items()}
    wanted["chat"] += count - sum(wanted.values())
    seen: set[str] = set()
    prompts: list[tuple[str, str]] = []
    for category, number in wanted.items():
        found = tries = 0
        while found < number:
            tries += 1
            if tries > 100 * number + 1000:
                raise SystemExit(f"{category}: only {found} of {number} different prompts; ask for fewer")
            text = makers[category](rng)
            key = " ".join(re.findall(r"\w+", text.lower()))
            if key not in seen and len(text.split()) <= MOST_WORDS:
                seen.add(key)
                prompts.append((category, text))
                found += 1
    rng.shuffle(prompts)
    return [
        {"id": f"generated/{seed}/{number}", "category": category, "messages": [{"role": "user", "content": text}]}
        for number, (category, text) in enumerate(prompts)
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--passages", type=Path, nargs="+", default=[], help="plain text, or JSONL with a text in each line"
    )
    options = parser.parse_args()
    prompts = generate(options.count, options.seed, options.passages)
    with options.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in prompts)
    for category, number in Counter(each["category"] for each in prompts).most_common():
        print(f"{category:14} {number}")


if __name__ == "__main__":
    main()
