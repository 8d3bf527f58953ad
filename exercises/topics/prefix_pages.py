"""Pages found by the text before them and their own tokens: what exercise 16.7 keeps, and what is kept otherwise."""

from __future__ import annotations

from types import SimpleNamespace


class Pages:
    def __init__(self, page_size):
        self.size, self.clock, self.held = page_size, 0, {}

    def walk(self, tokens):
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            spot = self.held.get(tuple(tokens[:end]))
            if spot is None:
                break
            found.append(spot)
        return found

    def match(self, tokens):
        self.clock += 1
        found = self.walk(tokens)
        for spot in found:
            spot.used = self.clock
        return [spot.page for spot in found]

    def insert(self, tokens, pages):
        held = self.match(tokens)
        for number in range(len(held), len(pages)):
            end = (number + 1) * self.size
            self.held[tuple(tokens[:end])] = SimpleNamespace(page=pages[number], used=self.clock, locks=0)
        return [own for own, kept in zip(pages, held) if own != kept]

    def lock(self, tokens):
        for spot in self.walk(tokens):
            spot.locks += 1

    def unlock(self, tokens):
        for freed in self.walk(tokens):
            freed.locks -= 1

    def evictable(self):
        return sum(spot.locks == 0 for spot in self.held.values())

    def evict(self, count):
        gone = []
        while len(gone) < count:
            before = {key[: -self.size] for key in self.held}
            ends = [key for key in self.held if key not in before and self.held[key].locks == 0]
            if not ends:
                break
            key = min(ends, key=lambda key: self.held[key].used)
            gone.append(self.held.pop(key).page)
        return gone


def into(found, held, tokens, same, size):
    """One page more where less than a page is left: the first that stands there, and has so many tokens in common."""
    end = (len(found) + 1) * size
    places = [key for key in held if len(key) == end > len(tokens) and key[:same] == tuple(tokens[:same])]
    return found + [held[key] for key in places[:1]]


def keyed(make, tokens, size):
    """As long as the tokens, but of each page what is made of its tokens stands for them."""
    parts = [make(tokens[begin : begin + size]) for begin in range(0, len(tokens), size)]
    return tuple(one for part in parts for one in (part, *(None,) * (size - 1)))
