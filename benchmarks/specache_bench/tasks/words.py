"""The words that English prompts are built from."""

from __future__ import annotations


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


ADJECTIVES = _split(
    "amber ancient bitter bold brave bright broad calm cheerful clever cold crimson curious dusty eager faint fierce"
    " gentle golden grand green hollow humble icy ivory jolly keen late light lively lonely loud mellow mild misty"
    " narrow noble odd pale patient plain proud quick quiet rapid rare rough royal rusty scarlet shy silent silver"
    " simple sleepy slender smooth solemn steady strange sturdy sudden swift tall tender tidy tiny vast violet warm"
    " weary wild wise young"
)
NOUNS = _split(
    "acorn anchor apple arrow badger barrel basket beacon bell bridge bucket button candle canyon castle chapel"
    " cherry cloud cottage crane curtain desert dolphin door eagle ember falcon feather fiddle field forest"
    " fountain fox garden gate glacier goose hammer harbor hazel hill island jacket jewel kettle kitten ladder"
    " lake lantern leaf lemon lily lizard maple marble meadow mill mirror mountain needle oak ocean orchard otter"
    " owl paddle palace pepper pigeon pillow pine planet pond rabbit raven river robin rocket saddle sailor shadow"
    " sparrow spoon spring stable stone swan table tavern temple thistle tiger tower trumpet tulip turtle valley"
    " velvet village violin wagon walnut whale willow window winter wolf"
)
VERBS = _split(
    "admired answered avoided carried circled climbed covered crossed drew faced followed found guarded held joined"
    " knew left liked lost marked met missed moved noticed painted passed reached remembered saw shared sketched"
    " touched visited watched"
)
TIMES = _split(
    "in spring;at noon;last winter;before dawn;after the rain;on Sunday;in silence;by chance;at night;that evening;"
    "once a year;long ago;for a while;near the end;in the morning;as usual",
    ";",
)
CITIES = _split(
    "Athens Berlin Cairo Dublin Geneva Havana Lisbon Madrid Oslo Paris Prague Rome Tokyo Vienna Warsaw Zurich"
)
COLORS = _split("black blue brown gray green orange pink purple red white yellow")
