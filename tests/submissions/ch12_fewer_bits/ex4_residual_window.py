"""Wrong answers to exercise 12.4, and unusual right ones."""

from tests.submissions.edits import changed, edited

LIMIT = "while len(self.whole) >= self.window + self.group:"
GROUP = "self.kept.append(self.quantise(self.whole[: self.group].clone()))"
REST = "self.whole = self.whole[self.group :]"
JOINED = "self.whole = keys.clone() if self.whole is None else torch.cat((self.whole, keys))"

RING = """# Exercise 12.4 · The residual window
class KeyWindow:
    def __init__(self, group, window, quantise):
        self.g, self.w, self.q = group, window, quantise
        self.room, self.first, self.count, self.done = None, 0, 0, []

    def append(self, keys):
        size = self.g + self.w
        if self.room is None:
            self.room = torch.zeros(size, *keys.shape[1:], dtype=keys.dtype)
        for key in keys:
            self.room[(self.first + self.count) % size] = key
            self.count += 1
            if self.count == size:
                places = (self.first + torch.arange(self.g)) % size
                self.done.append(self.q(self.room[places]))
                self.first, self.count = (self.first + self.g) % size, self.w

    def groups(self):
        return self.done

    def recent(self):
        return self.room[(self.first + torch.arange(self.count)) % (self.g + self.w)]
"""

BUFFER = """# Exercise 12.4 · The residual window
class KeyWindow:
    def __init__(self, group, window, quantise):
        self.group, self.window, self.quantise = group, window, quantise
        self.kept, self.buffer, self.used = [], None, 0

    def append(self, keys):
        if self.buffer is None:
            self.buffer = keys.new_empty(self.window + self.group, keys.shape[1])
        for key in keys:
            self.buffer[self.used] = key
            self.used += 1
            if self.used == len(self.buffer):
                self.kept.append(self.quantise(self.buffer[: self.group].clone()))
                self.buffer[: self.window] = self.buffer[self.group :].clone()
                self.used = self.window

    def groups(self):
        return list(self.kept)

    def recent(self):
        return self.buffer[: self.used].clone()
"""

WRONG = {
    "one_key_late": changed("12.4", (LIMIT, LIMIT.replace(">=", ">"))),
    "one_group_an_append": changed("12.4", (LIMIT, LIMIT.replace("while", "if"))),
    "window_ignored": changed("12.4", (LIMIT, "while len(self.whole) >= self.group:")),
    # As KIVI does, whose window is a multiple of the group.
    "window_flushed": changed(
        "12.4",
        (
            LIMIT,
            "due = len(self.whole) >= self.window + self.group\n"
            "        while due and len(self.whole) >= self.group:",
        ),
    ),
    "last_window_kept": changed(
        "12.4", (LIMIT, LIMIT.replace("while", "if")), (REST, "self.whole = self.whole[-self.window :]")
    ),
    "groups_not_full": changed("12.4", (LIMIT, "while len(self.whole) > self.window:")),
    "window_of_all": changed("12.4", (LIMIT, "while len(self.whole) >= max(self.window, self.group):")),
    "newest_quantised": changed(
        "12.4",
        (GROUP, GROUP.replace("[: self.group]", "[-self.group :]")),
        (REST, "self.whole = self.whole[: -self.group]"),
    ),
    "still_in_the_window": changed("12.4", (LIMIT, LIMIT.replace("while", "if")), (REST, "")),
    "rest_lost": changed("12.4", (REST, "self.whole = self.whole[:0]")),
    "all_in_one_group": changed(
        "12.4", (GROUP, "self.kept.append(self.quantise(self.whole.clone()))"), (REST, "self.whole = self.whole[:0]")
    ),
    "all_in_one_group__but_the_window": changed(
        "12.4",
        (
            GROUP,
            "n = len(self.whole) - self.window\n            self.kept.append(self.quantise(self.whole[:n].clone()))",
        ),
        (REST, "self.whole = self.whole[n:]"),
    ),
    "groups_reversed": changed("12.4", (GROUP, GROUP.replace("append(", "insert(0, "))),
    "last_group_alone": changed("12.4", (GROUP, "self.kept = [self.quantise(self.whole[: self.group].clone())]")),
    "new_keys_first": changed("12.4", ("torch.cat((self.whole, keys))", "torch.cat((keys, self.whole))")),
    "old_keys_replaced": changed("12.4", (JOINED, "self.whole = keys.clone()")),
    "view_of_the_callers": changed("12.4", ("keys.clone() if", "keys if")),
    "group_changes_later": edited(
        BUFFER, ("self.quantise(self.buffer[: self.group].clone())", "self.quantise(self.buffer[: self.group])")
    ),
    "recent_changes_later": edited(
        BUFFER, ("return self.buffer[: self.used].clone()", "return self.buffer[: self.used]")
    ),
    "state_shared": edited(
        changed(
            "12.4",
            ("    def __init__", "    kept = []\n\n    def __init__"),
            ("self.kept, self.whole = [], None", "self.whole = None"),
        ),
    ),
    "one_key_late__and_groups_reversed": changed(
        "12.4", (LIMIT, LIMIT.replace(">=", ">")), (GROUP, GROUP.replace("append(", "insert(0, "))
    ),
}

UNUSUAL = {
    "a ring, key by key": RING,
    "a buffer that is moved": BUFFER,
    "a list of keys": """# Exercise 12.4 · The residual window
class KeyWindow:
    def __init__(self, group, window, quantise):
        self.size, self.window, self.quantise, self.all, self.made = group, window, quantise, [], []

    def append(self, keys):
        self.empty = keys[:0].clone()
        self.all += [key.clone() for key in keys]
        for n in range(len(self.made), max(0, len(self.all) - self.window) // self.size):
            self.made.append(self.quantise(torch.stack(self.all[n * self.size : (n + 1) * self.size])))

    def groups(self):
        return self.made

    def recent(self):
        rest = self.all[len(self.made) * self.size :]
        return torch.stack(rest) if rest else self.empty
""",
}
