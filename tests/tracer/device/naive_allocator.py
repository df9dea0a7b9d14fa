"""The caching allocator as slowly and plainly as it can be written: the oracle for random histories.

A segment is a list of pieces [size, what], in order; `what` is a request's number, FREE or, in an expandable range,
UNMAPPED. Everything is found by looking at everything.
"""

FREE, UNMAPPED = "free", "unmapped"
KIB, MIB = 1 << 10, 1 << 20


class Segment:
    def __init__(self, address, size, stream, small, page=None):
        self.address, self.stream, self.small, self.page = address, stream, small, page
        self.pieces = [[size, FREE if page is None else UNMAPPED]]

    def offsets(self):
        at = self.address
        for index, (size, what) in enumerate(self.pieces):
            yield index, at, size, what
            at += size

    def join(self):
        index = 0
        while index + 1 < len(self.pieces):
            (size, what), (more, same) = self.pieces[index], self.pieces[index + 1]
            if what == same and what in (FREE, UNMAPPED):
                self.pieces[index : index + 2] = [[size + more, what]]
            else:
                index += 1

    def reserved(self):
        return sum(size for size, what in self.pieces if what != UNMAPPED)


class NaiveAllocator:
    """Default settings, `expandable`, or a `max_split` in bytes. `driver` is called as by CachingAllocator."""

    def __init__(self, driver, *, expandable=False, max_split=None, span=1 << 42):
        self.driver, self.expandable, self.span = driver, expandable, span
        self.max_split = max_split or float("inf")
        self.segments = []
        self.retries = 0

    def malloc(self, number, request, stream):
        """Address for the request, or None: out of memory."""
        need = max(512, (request + 511) // 512 * 512)
        small = need <= MIB
        place = self.search(need, stream, small) or self.grow(need, stream, small)
        if place is None and self.release_some(need, stream, small):
            place = self.grow(need, stream, small)
        if place is None:
            self.retries += 1
            self.release_all()
            place = self.grow(need, stream, small)
        if place is None:
            return None
        segment, index = place
        size = segment.pieces[index][0]
        rest = size - need
        split = rest >= 512 if small or self.expandable else rest > MIB and need < self.max_split
        segment.pieces[index : index + 1] = [[need, number], [rest, FREE]] if split else [[size, number]]
        return next(at for i, at, _, _ in segment.offsets() if i == index)

    def free(self, number):
        for segment in self.segments:
            for piece in segment.pieces:
                if piece[1] == number:
                    piece[1] = FREE
            segment.join()

    def search(self, need, stream, small):
        found = []
        for segment in self.segments:
            if (segment.stream, segment.small) != (stream, small):
                continue
            for index, at, size, what in segment.offsets():
                if what == FREE and size >= need:
                    after = segment.pieces[index + 1] if index + 1 < len(segment.pieces) else [0, None]
                    reach = size + (after[0] if after[1] == UNMAPPED else 0)
                    found.append((size, at, reach, segment, index))
        found.sort(key=lambda row: row[:2])
        if not found:
            return None
        best = found[0]
        if self.expandable:  # walk on while the next one could grow less far
            for candidate in found[1:]:
                if candidate[2] >= best[2]:
                    break
                best = candidate
        size = best[0]
        if need < self.max_split <= size or (need >= self.max_split and size >= need + 20 * MIB):
            return None
        return best[3], best[4]

    def grow(self, need, stream, small):
        if self.expandable:
            return self.grow_pages(need, stream, small)
        if small:
            size = 2 * MIB
        elif need < 10 * MIB:
            size = 20 * MIB
        else:
            size = (need + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        address = self.driver.allocate(size)
        if address is None:
            return None
        self.segments.append(Segment(address, size, stream, small))
        return self.segments[-1], 0

    def grow_pages(self, need, stream, small):
        page = 2 * MIB if small else 20 * MIB
        segment, index = self.room(need, stream, small, page)
        while True:
            size, what = segment.pieces[index]
            if what == FREE and size >= need:
                return segment, index
            at = index if what == UNMAPPED else index + 1
            room = segment.pieces[at][0]
            wanted = min(need, room) if what == UNMAPPED else min(need - size, room)
            pages = (wanted + page - 1) // page * page
            address = next(address for i, address, _, _ in segment.offsets() if i == at)
            if not self.driver.map(address, pages):
                return None
            segment.pieces[at : at + 1] = [[pages, FREE]] + ([[room - pages, UNMAPPED]] if room > pages else [])
            segment.join()
            index = max(
                i for i, begin, length, kind in segment.offsets() if kind == FREE and begin <= address < begin + length
            )

    def room(self, need, stream, small, page):
        starts = []
        for segment in self.segments:
            if (segment.stream, segment.small) == (stream, small):
                starts += [(at, segment, index) for index, at, _, what in segment.offsets() if what == UNMAPPED]
        for _, segment, index in sorted(starts, key=lambda start: start[0]):
            first = index - 1 if index and segment.pieces[index - 1][1] == FREE else index
            total = 0
            for size, what in segment.pieces[first:]:
                if what not in (FREE, UNMAPPED):
                    break
                total += size
            if total >= need:
                return segment, first
        self.segments.append(Segment(self.driver.reserve_range(), self.span // page * page, stream, small, page))
        return self.segments[-1], 0

    def release_some(self, need, stream, small):
        if self.max_split == float("inf"):
            return False
        wanted = max(need, self.max_split)
        mine = [s for s in self.segments if (s.stream, s.small) == (stream, small)]
        free = sorted(
            (size, at, s) for s in mine for _, at, size, what in s.offsets() if what == FREE
        )  # all oversize free blocks are whole segments
        large_enough = [row for row in free if row[0] >= wanted]
        if large_enough:
            self.release(large_enough[0][2])
            return True
        released = 0
        for size, _, segment in reversed(free):
            if released >= wanted or size < self.max_split:
                break
            self.release(segment)
            released += size
        return released >= wanted

    def release(self, segment):
        self.segments.remove(segment)
        self.driver.release(segment.address, segment.reserved())

    def release_all(self):
        for segment in list(self.segments):
            if segment.page is None:
                if len(segment.pieces) == 1 and segment.pieces[0][1] == FREE:
                    self.release(segment)
                continue
            had, pieces = segment.pieces, []
            for _, at, size, what in segment.offsets():
                begin = segment.address + -(-(at - segment.address) // segment.page) * segment.page
                end = segment.address + (at + size - segment.address) // segment.page * segment.page
                if what != FREE or begin >= end:
                    pieces.append([size, what])
                    continue
                self.driver.release(begin, end - begin)
                pieces += [[begin - at, FREE], [end - begin, UNMAPPED], [at + size - end, FREE]]
            segment.pieces = [piece for piece in pieces if piece[0]]
            segment.join()
            # A range that was never mapped stays: its first growth failed, and it waits for the next.
            if len(segment.pieces) == 1 and segment.pieces[0][1] == UNMAPPED and had != segment.pieces:
                self.segments.remove(segment)

    def reserved(self):
        return sum(segment.reserved() for segment in self.segments)
