"""A device whose memory is apart from the host's, without one: what is brought there and back is copied and counted."""

from holdfast.devices.device import Host, Outgoing


class Elsewhere(Host):
    """The host's processor, whose results are copied to whoever sends them, as is all that is brought to it."""

    apart = True

    def __init__(self):
        super().__init__()
        self.here, self.there = 0, 0

    def outgoing(self, tensor):
        self.here += 1
        return Outgoing(tensor.detach().clone())

    def brought(self, tensor):
        self.there += 1
        return tensor.clone()
