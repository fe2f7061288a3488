"""The vocabulary of the planted facts: names, attributes with their values, and word groups."""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""Adam Agnes Albert Alex Alice Amy Andrea Andrew Anna Anthony Arthur Barbara Beatrice Ben Bernard Betty
    Bill Brian Bruno Carl Carla Carmen Caroline Cecil Charles Charlotte Chloe Chris Clara Claude Colin Cora
    Daisy Daniel David Dennis Diana Donald Dora Dorothy Edgar Edith Edward Elena Eliza Ella Ellen Emily Emma
    Eric Erica Ernest Esther Ethan Eva Evan Felix Fiona Flora Florence Frances Frank Fred George Gerald
    Gilbert Grace Greta Gustav Hannah Harold Harriet Harry Heather Hector Helen Henry Herbert Hilda Holly
    Homer Howard Hugo Ida Ingrid Irene Iris Isaac Ivan Ivy Jack Jacob James Jane Janet Jason Jean Jenny
    Jeremy Jerome Jessica Joan Joel John Jonas Joseph Joyce Judith Julia Julian June Karen Karl Kate Keith
    Kenneth Kevin Laura Lawrence Leo Leon Leonard Lewis Linda Lisa Louis Louise Lucas Lucy Luke Lydia Mabel
    Marco Margaret Maria Marion Mark Martha Martin Mary Matthew Max Melissa Michael Miles Miriam Molly
    Monica Moses Nancy Naomi Nathan Nicholas Nina Noah Nora Norman Oliver Olga Oscar Otto Owen Patrick Paul
    Paula Peter Philip Phoebe Quentin Rachel Ralph Raymond Rebecca Richard Rita Robert Robin Roger Roland
    Rosa Rose Rudolf Ruth Sally Samuel Sandra Sarah Sebastian Silvia Simon Sophia Stella Stephen Steven
    Susan Sylvia Teresa Theodore Thomas Timothy Tina Toby Tom Tony Ursula Valentin Vera Victor Victoria
    Vincent Viola Violet Virginia Vivian Walter Wanda Wendy Wilfred William Winston Xavier Yvonne Zachary
    Zoe""")

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "favourite colour": _words("red green blue yellow purple orange brown black white pink grey silver gold"),
    "favourite fruit": _words("apple pear plum cherry grape lemon melon peach mango fig banana apricot"),
    "favourite animal": _words("dog cat horse cow sheep goat fox wolf bear owl eagle rabbit mouse whale"),
    "favourite drink": _words("tea coffee milk water cider cocoa lemonade juice wine beer soda cream"),
    "favourite season": (
        "early spring",
        "late spring",
        "high summer",
        "late summer",
        "autumn",
        "deep winter",
    ),
    "home town": _words(
        "Paris London Rome Berlin Madrid Vienna Athens Cairo Delhi Tokyo Boston Chicago Oslo Dublin Lisbon"
    ),
    "profession": _words(
        "doctor teacher farmer lawyer painter sailor soldier baker butcher carpenter nurse pilot writer judge"
    ),
    "hobby": _words(
        "chess fishing painting dancing reading swimming sewing cooking hunting gardening singing"
    ),
    "instrument": _words("piano violin flute guitar drum trumpet harp organ cello horn fiddle whistle"),
    "vehicle": (
        "red car",
        "old truck",
        "bicycle",
        "small boat",
        "wagon",
        "grey horse",
        "train",
        "blue van",
        "cart",
    ),
    "lucky number": tuple(str(number) for number in range(11, 99)),
    "pet": _words("dog cat parrot rabbit turtle pony goldfish snake frog lizard goose duck monkey"),
    "first language": _words(
        "English French German Spanish Italian Latin Greek Russian Arabic Chinese Hebrew"
    ),
    "field of study": _words("history law physics chemistry biology medicine music art economics geography"),
    "birth month": _words(
        "January February March April May June July August September October November December"
    ),
    "favourite flower": _words("rose lily daisy violet tulip poppy orchid lotus iris clover heather jasmine"),
}

RELATIONS = ("best friend", "neighbour", "teacher", "brother", "sister", "doctor", "manager", "partner")

WORD_GROUPS: dict[str, tuple[str, ...]] = {
    "animals": _words(
        "dog cat horse cow sheep goat fox wolf bear lion tiger rabbit mouse elephant monkey pig"
    ),
    "birds": _words("eagle owl hawk crow swan goose duck parrot sparrow robin raven pigeon chicken turkey"),
    "fruits": _words("apple pear plum cherry grape lemon melon peach mango fig banana orange apricot berry"),
    "colours": _words("red green blue yellow purple brown black white pink grey scarlet crimson violet"),
    "tools": _words(
        "hammer saw axe knife spade shovel drill needle rope ladder brush wrench scissors chisel"
    ),
    "vehicles": _words("car truck train ship boat wagon bicycle bus airplane cart carriage canoe van sled"),
    "metals": _words("iron gold silver copper tin lead zinc steel nickel brass aluminum mercury platinum"),
    "clothes": _words("coat hat shirt dress shoe boot glove scarf cap cloak skirt jacket belt sock"),
    "body parts": _words("arm leg hand foot head knee elbow shoulder finger nose ear mouth neck heart"),
    "jobs": _words(
        "doctor teacher farmer lawyer painter sailor soldier baker nurse pilot writer judge priest"
    ),
    "furniture": _words("table chair bed desk sofa shelf cupboard bench lamp carpet mirror drawer stool"),
    "countries": _words(
        "France Germany Spain Italy China India Egypt Japan Brazil Canada Mexico Russia Greece"
    ),
}

ADJECTIVES = _words("""amber ancient bitter bold brave bright broken
    calm clever cold cool crimson curious dark deep distant
    dry early empty faint fair final flat fresh gentle golden grand great green happy heavy hidden high
    hollow honest huge humble idle icy iron keen kind large late light little lonely long loud low lucky
    mild narrow new noble old open pale plain proud pure quick quiet rapid rare rich rough round royal sad
    sharp short silent silver simple slow small smooth soft solid steady strange strong sudden sweet swift
    tall thick thin tiny warm wet white wide wild wise wooden young""")

NOUNS = _words("""anchor
    apple arch arrow badge barn basket beach bell bird boat book bottle bridge brook button cabin
    candle canyon castle cave chain chair cliff clock cloud coast coin corner creek crown desert door dream
    drum eagle engine farm feather fence field fire fish flag flame flower forest fountain fox garden gate
    glass glove hammer harbor hat hill horse house island jacket jewel key kettle king kitchen ladder lake
    lamp lantern leaf letter library lion machine market meadow mill mirror moon mountain needle nest ocean
    orchard paper path pearl pencil pillow planet pond prince queen rain ribbon ring river road rock roof
    rope sail shadow shell ship silk sky snow spring star station stone storm street sun table temple thread
    tiger tower train tree tunnel valley village wagon wall water wheel window winter wolf wood""")

VERBS = _words("""add apply build change check clean clear close collect compare compute copy count create divide draw
    drop fill find fold format group join keep limit list load make mark measure merge move open order pack
    pick plan plot press print pull push read remove reset round run save scale search select send set shift
    show sort split start stop store swap test trace track turn update wait wrap write""")

_ONSETS = _words("b d f g k l m n p r s t v z")
_VOWELS = _words("a e i o u")


def nonsense(rng: random.Random) -> str:
    """Return a made-up word of two syllables, such as "zolu"."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2))


def distinct_pairs(
    rng: random.Random, left: tuple[str, ...], right: tuple[str, ...], joint: str, count: int
) -> list[str]:
    """Return `count` different combinations of one word of each list, with `joint` between."""
    numbers = rng.sample(range(len(left) * len(right)), count)
    return [left[number // len(right)] + joint + right[number % len(right)] for number in numbers]
