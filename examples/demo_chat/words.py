"""Words and values for the training conversations of demo-chat."""

from __future__ import annotations

import random
from collections.abc import Sequence


def words_of(text: str) -> tuple[str, ...]:
    """Returns the words of a text: a short way to write a long tuple of words in the source."""
    return tuple(text.split())


CITIES = words_of(
    """Lisbon Porto Madrid Seville Paris Lyon Nice London Leeds Dublin Cork Oslo Bergen Stockholm
    Malmo Copenhagen Aarhus Helsinki Tampere Tallinn Riga Vilnius Warsaw Krakow Gdansk Berlin
    Hamburg Munich Cologne Vienna Graz Prague Brno Zurich Geneva Basel Rome Milan Turin Naples
    Venice Athens Patras Istanbul Ankara Cairo Tunis Rabat Dakar Lagos Accra Nairobi Kampala Lusaka
    Durban Tokyo Osaka Kyoto Nagoya Seoul Busan Beijing Shanghai Taipei Hanoi Bangkok Manila
    Jakarta Singapore Delhi Mumbai Chennai Lahore Dhaka Sydney Perth Auckland Lima Quito Bogota
    Santiago Montevideo Havana Boston Chicago Denver Seattle Dallas Austin Houston Toronto Montreal
    Vancouver Zürich Málaga Tromsø Łódź Besançon Bogotá Kraków"""
)
PEOPLE = words_of(
    """Ana Ben Carla David Elena Felix Greta Hugo Ines Jonas Kira Lars Maria Nora Oscar Paula Quinn
    Rosa Simon Tina Ugo Vera Walter Xenia Yusuf Zoe Amir Bianca Chen Dora Emil Fatima Goran Hana
    Igor Julia Karim Lena Mikko Nadia Olga Pedro Rania Sven Tomas Ursula Viktor Wanda Yara Zeno"""
)
FAMILY_NAMES = words_of(
    """Silva Costa Moreau Keller Novak Larsen Virtanen Rossi Greco Lopez Ortiz Braun Fischer Kovacs
    Horvat Ivanov Demir Haddad Okafor Mensah Tanaka Sato Park Nguyen Rao Gupta Costello Walsh
    Murphy Carter"""
)
NOUNS = words_of(
    """price stock order invoice balance salary score rank level status address route ticket report
    message reminder meeting event song album playlist film book chapter recipe lamp door window
    heater camera printer server folder file image table record account card payment refund parcel
    shipment flight train bus taxi hotel room seat menu dish coupon contract policy lesson exam
    grade course patient doctor dose test sample sensor battery engine tyre pump valve tank field
    crop harvest translation summary definition synonym password token key note task project sprint
    bug branch commit release backup job queue alarm timer calendar contact group channel comment
    review vote poll"""
)
VERBS = words_of(
    """get find show read check list count open close start stop send create delete update move copy
    print book cancel order pay track measure compute rename search play pause lock unlock save
    load archive approve publish"""
)
PARAMETERS = words_of(
    """name id code city path query count limit size colour date title amount level speed room user
    key tag file text language currency width height page table number street country product
    category model version host port owner topic weight price status owner reason format mode unit
    duration user_id order_id file_name start_date end_date first_name max_results room_number"""
)
RESULT_KEYS = words_of(
    """status name total count size price date owner state level result value id city rating length
    colour code updated created temperature wind mail phone"""
)
ADJECTIVES = words_of(
    """red blue green black white small large old new cheap warm cold fast slow quiet open closed
    ready empty full late active blocked sunny cloudy rainy windy foggy clear"""
)
# Words of texts that the model has to repeat, and of facts.
ENGLISH = words_of(
    """a about above after again air all also always an and animal another any are around as ask at
    away baby back bad ball be beach because bed before begin behind best better between big bird
    bit blood boat body book both box boy bread break bring brother brown build but buy by cake call
    came can car carry cat catch chair change child city class clean clock close cloud coat coffee
    cold come cook corner could country cow cut dance dark day deep desk did dinner dog done door
    down draw dream dress drink drive dry each ear early earth eat egg eight end enough even evening
    ever every eye face fall family far farm fast father feel few field fill find fine finger fire
    first fish five floor flower fly food foot for forest found four fox free fresh friend from
    fruit full fun game garden gave get girl give glad glass go goes gold good got grass great green
    grow had hair half hand happy hard has hat have he head hear heart heavy hello help her here
    high hill him his hold home hope horse hot hour house how hundred hurry I ice idea if in inside
    is it jump just keep kind kitchen know lake lamp land large last late laugh learn leave left leg
    less letter life light like line lion little live long look lost lot loud love low lunch made
    make man many map market may me meat meet milk mind minute money month moon more morning most
    mother mountain mouse mouth moved much music must my name near need never new next nice night
    nine no north nose not nothing now number of off often old on once one only open or orange other
    our out over own page paint paper park part pen people picture piece place plan plant play
    please point poor pretty pull push put queen quick quiet rain read ready red rest rice right
    river road rock room round run sad said salt same sand saw say school sea second see seven she
    ship shirt shoe shop short should show side simple sing sister sit six sky sleep slow small snow
    so soft some song soon south space spring stand star start stay step still stone stop store
    story street strong such summer sun sweet swim table take talk tall tea teach tell ten test than
    thank that the their them then there these they thing think this those three time tired to today
    together told tomorrow too took town train tree true try turn two under until up us use very
    voice wait walk wall want warm was wash watch water way we week well went were west wet what
    wheel when where which white who why will wind window winter wish with woman wood word work
    works world would write year yellow yes yesterday you young your zoo"""
)
SENTENCES = tuple(
    text.strip()
    for text in """it works|hello world|good morning|good night|hi|yes|no|hello|it goes on|thank you
    |well done|all is well|so far so good|see you soon|this is a test|one two three|testing
    |the quick brown fox jumps over the lazy dog|to be or not to be|happy birthday|I am here
    |I like tea|the door is open|the cat sits on the mat|we are ready|here we go|never mind
    |that is all|and so on|it works, and so on|ready, steady, go|time to go home|it is late
    |what a nice day|let us begin|please wait|nothing to see here|the end|once more|try again
    |how are you|where are you|who is there|the sun is out|it rains again|all systems go|ok|okay
    |I think so|not yet|come in|welcome back|good luck|have fun|keep calm|stay here|turn left|abc
    |merry Christmas|the train is late|bread and butter|black and white|my name is nobody|banana
    |I can count|this works too|does it work|it does not work|it worked|works|work|cheese
    |a small step|life is good|the weather is fine|nice to meet you|over and out
    |open the window""".replace("\n", "").split("|")
)
# The UNSEEN lists are for tests only.
UNSEEN_ENGLISH = words_of(
    """apple bridge butter candle castle copper cousin desert dragon engine feather hammer island
    ladder lemon mirror pepper planet ribbon shadow silver spider sugar thunder turtle velvet waving
    whisper yogurt jumping asked bigger coming faster helps looking nearly pleased reading sleepy"""
)
UNSEEN_NOUNS = words_of(
    """mortgage elevator aquarium compass telescope violin parachute glacier lantern passport
    pyramid scaffold tractor umbrella vaccine warehouse beehive cathedral dividend escalator"""
)
UNSEEN_VERBS = words_of("inspect calibrate dispatch rotate summon polish forecast borrow")
UNSEEN_PARAMETERS = words_of(
    """altitude brand cargo depth fabric genre hardness isbn jersey kernel latitude material
    nickname origin pressure radius supplier texture voltage zone fuel_type seat_class crew_size"""
)

ONSETS = words_of("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl st tr sh th qu x y")
VOWELS = words_of("a e i o u ai ea io ou")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENDINGS = words_of(
    """er or ing ed ion ation ment ure age al ic ous ity ness able ate ive ist ism ance ence ent ant
    ship hood ful less ly y ie le el en et on um us is oid ine ide ise ite ile ard ory ary ette"""
)
PREFIXES = ("New", "San", "Port", "Saint")
CODAS = ("", "", "", *words_of("l m n r s t x nd rk st ck"))


class Words:
    """Draws random words and values for conversations. `unseen`: words that only tests use."""

    def __init__(self, rng: random.Random, *, unseen: bool = False) -> None:
        self.rng = rng
        self._unseen = unseen

    def invented(self) -> str:
        """Returns a word of random syllables, some with an English ending, or of random letters."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.2:
            return "".join(rng.choices(LETTERS, k=rng.randrange(4, 8)))
        while True:
            word = "".join(
                rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
                for _ in range(rng.choice((1, 1, 2) if kind < 0.5 else (1, 2, 2, 3)))
            )
            word += rng.choice(ENDINGS) if kind < 0.5 else ""
            if len(word) > 3:
                return word

    def either(self, words: Sequence[str], share: float = 0.4) -> str:
        """Returns one of `words` or an invented word.

        The word is invented with probability `share`, and always if the text is `unseen`.
        """
        if self._unseen or self.rng.random() < share:
            return self.invented()
        return self.rng.choice(words)

    def _listed(self, seen: Sequence[str], unseen: Sequence[str], share: float) -> str:
        if self.rng.random() < share:
            return self.invented()
        return self.rng.choice(unseen if self._unseen else seen)

    def noun(self) -> str:
        noun = self._listed(NOUNS, UNSEEN_NOUNS, 0.4)
        return f"{self._listed(NOUNS, UNSEEN_NOUNS, 0.4)} {noun}" if self.chance(0.15) else noun

    def verb(self) -> str:
        return self._listed(VERBS, UNSEEN_VERBS, 0.2)

    def parameter(self) -> str:
        return self._listed(PARAMETERS, UNSEEN_PARAMETERS, 0.35)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def person(self) -> str:
        """Returns a first name, or a first name and a family name."""
        first = self.either(PEOPLE).capitalize()
        return first if self.chance(0.6) else f"{first} {self.either(FAMILY_NAMES).capitalize()}"

    def city(self) -> str:
        name = self.either(CITIES).capitalize()
        return f"{self.rng.choice(PREFIXES)} {name}" if self.chance(0.1) else name

    def word(self) -> str:
        return self.either((*ADJECTIVES, *NOUNS), 0.6)

    def phrase(self) -> str:
        return " ".join(self.word() for _ in range(self.rng.choice((2, 2, 3))))

    def plain(self) -> str:
        """Returns an English word, seldom an invented word."""
        return self._listed(ENGLISH, UNSEEN_ENGLISH, 0.08)

    def english(self) -> str:
        """Returns a sentence or a few plain words, in a user's style."""
        pick = self.rng.choice
        if self.chance(0.4) and not self._unseen:
            text = pick(SENTENCES)
        else:
            count = pick((1, 1, 2, 2, 3, 3, 4, 5, 6, 8))
            text = " ".join(self.plain() for _ in range(count))
            if count > 3 and self.chance(0.2):
                text = text.replace(" ", ", ", 1)
        kind = self.rng.random()
        if kind < 0.25:
            text = text[:1].upper() + text[1:]
        elif kind < 0.28:
            text = text.upper()
        return text + pick(("", "", "", "", ".", "!", "?", "..."))

    def integer(self) -> str:
        return str(self.rng.randrange(10 ** self.rng.choice((1, 2, 2, 3, 3, 4, 5))))

    def decimal(self) -> str:
        return f"{self.integer()}.{self.rng.randrange(1, 100):02d}".rstrip("0")

    def code(self) -> str:
        """Returns an identifier with digits: INV-2041, x93, 4711."""
        rng = self.rng
        letters = rng.choice(("", "A", "B", "X", "ab", "inv", "NR", "K", self.invented()))
        digits = str(rng.randrange(10, 10 ** rng.choice((2, 3, 4, 5))))
        return letters + rng.choice(("", "-", "-", "_") if letters else ("",)) + digits

    def date(self) -> str:
        draw = self.rng.randrange
        return f"{draw(2020, 2032)}-{draw(1, 13):02d}-{draw(1, 29):02d}"

    def clock(self) -> str:
        return f"{self.rng.randrange(24):02d}:{self.rng.randrange(60):02d}"

    def mail(self) -> str:
        name = self.either(PEOPLE).lower()
        return f"{name}@{self.invented()}.{self.rng.choice(('org', 'com', 'net'))}"

    def file_name(self) -> str:
        folder = f"/{self.invented()}/" if self.chance(0.4) else ""
        return f"{folder}{self.word()}.{self.rng.choice(('txt', 'csv', 'pdf', 'json', 'py'))}"

    def text(self) -> str:
        """Returns a value for a parameter whose type is string."""
        makers = (
            *(self.person, self.person, self.city, self.city, self.word, self.word, self.phrase),
            *(self.code, self.code, self.integer, self.date, self.clock, self.mail),
            self.file_name,
        )
        return self.rng.choice(makers)()
