"""Every bound of the store, its unit, and what happens when it is reached. Their relations are asserted below."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Identity
KEY_BYTES = 32
TOKEN_DIGEST_BYTES = 16
BLOCK_TOKENS_MIN = 1
BLOCK_TOKENS_MAX = 4096
BLOCK_TOKENS_DEFAULT = 64
STRIPE_BLOCKS = 16
"""Consecutive blocks that placement sends to one node together."""
TOKEN_ID_MAX = 2**32 - 1
SPACE_BYTES_MAX = 16 * KIB
"""Encoded size of a space; a larger one is a ValueError."""
SPACE_LAYERS_MAX = 1024
SPACE_DIGEST_BYTES_MAX = 64
"""Bytes of a digest or salt in a space; longer is a ValueError (hash it first)."""
NAME_BYTES_MAX = 512
"""Model names, revisions, tenants, owners (UTF-8)."""
SPACES_MAX = 65_536
"""Spaces a store registers; the next one is refused (Overloaded)."""
PIN_UNTIL_S_MAX = 2**40
"""Latest end of a pin, seconds since the epoch; a later one is a ValueError (0 is a pin without an end)."""

# One call
LOOKUP_KEYS_MAX = 32_768
"""Keys in one lookup or touch, 2 Mi tokens at 64 a block; more is a ValueError."""
BATCH_BLOCKS_MAX = 1024
"""Blocks in one get or put; the client splits larger batches."""
PAYLOAD_BYTES_MAX = 64 * MIB
"""Bytes of one block; larger is a ValueError."""
STORED_BYTES_MAX = PAYLOAD_BYTES_MAX + 64
"""The same as stored: encryption adds some. A record that promises more is damaged."""
STATE_BYTES_MAX = 256 * MIB
"""Bytes of one state; larger is a ValueError."""
STATES_PER_LOOKUP_MAX = 64
"""States that one lookup answer lists; the deepest (then youngest) are kept."""
STATES_PER_PARENT_MAX = 32
"""States remembered under one parent block; the oldest is dropped."""
BATCH_BYTES_MAX = 512 * MIB
"""Payload bytes of one frame; the client splits, a server closes the connection."""
BODY_BYTES_MAX = 4 * MIB
"""Bytes of one frame's body (messages without payload); larger closes the connection."""

# Waiting
DEADLINE_S_DEFAULT = 5.0
DEADLINE_S_MAX = 600.0
FRAME_S_MAX = 30.0
"""A frame that has begun must be complete within this; a slower peer is disconnected."""
STALL_S_MAX = 5.0
"""A peer that takes nothing of an answer's payload for this long is disconnected: its blocks are leased meanwhile."""
IDLE_S_MAX = 3600.0
"""A connection without a request for this long is closed."""
HELLO_S_MAX = 5.0
DRAIN_S = 10.0
"""SIGTERM: requests in flight get this long."""

# Access
REPORTS_BURST_CONNECTION = 64
REPORTS_PER_S_CONNECTION = 16.0
REPORTS_BURST = 256
REPORTS_PER_S = 64.0
"""Corrupt blocks that a connection, and all together, report at once and a second; then a node answers Overloaded."""
TOKENS_MAX = 1024
"""Tokens in a daemon's file; more is a ValueError (every HELLO is compared with all of them)."""
TOKEN_ROLES_MAX = 64
"""Roles of one token, tenants counted."""
TOKENS_FILE_BYTES_MAX = 1 * MIB
CIPHER_KEYS_MAX = 16_384
"""Cipher keys of a node, of all tenants; more is a ValueError."""
CIPHER_KEYS_BYTES_MAX = 4 * MIB
CIPHER_COMMAND_S_MAX = 10.0
"""A command that prints cipher keys is killed after this; the keys before it stay, and a start fails."""

# Same host
LEASE_S = 5.0
"""Extents lent over a Unix socket may be read this long; then their segments may be recycled."""
DESCRIPTORS_MAX = 256
"""Descriptors of segments that one connection holds; when more are needed, all are sent anew."""
ARENA_BYTES_MAX = 512 * MIB
"""Memory that a client shares with daemons on its host; payloads for which it has no room are made elsewhere."""

# One node
CONNECTIONS_MAX = 4096
"""Connections of a node; the next is closed at once with Overloaded."""
IN_FLIGHT_BYTES_MAX = 512 * MIB
"""Payload bytes that a node holds in memory for puts, states and blocks that it unpacks or decrypts; then it answers
Overloaded.
"""
PUT_BUFFER_BYTES = 32 * MIB
"""A put is received and written in groups of this size, in reused buffers: at once, or in chunks as it comes."""
SEGMENT_BYTES_DEFAULT = 256 * MIB
SEGMENT_BYTES_MIN = 1 * MIB
SEGMENT_BYTES_MAX = 4 * GIB
CAPACITY_BYTES_MIN = 8 * MIB
OFFERS_MAX = 2**20
"""Keys offered once that a node remembers at least, where a class stores from the second offer (4 MiB); the oldest are
forgotten.
"""
TOMBSTONES_MAX = 262_144
"""Removed keys whose reason is remembered (for explain); the oldest is forgotten."""
FREE_MIN_SHARE = 0.01
"""Of a file system, what a volume leaves free unless told otherwise; puts that need more are refused."""
FREE_MIN_BYTES_MAX = 10 * GIB
"""The share above is never more than this."""
STATE_POOL_BYTES_DEFAULT = 512 * MIB
STATE_TTL_S_DEFAULT = 600.0
SCAN_PAGE_MAX = 10_000
"""Blocks in one page of a scan."""

# Events
EVENTS_BYTES_MAX = 16 * MIB
"""Blocks of the latest events that a node remembers; a reader that is further behind finds a gap."""
EVENT_BLOCKS_MAX = 1024
"""Blocks of one event; a larger change is several."""
EVENT_LINE_BYTES_MAX = MIB
"""Bytes of one event as JSON; a longer line is a ProtocolError of its reader."""
EVENT_LISTENERS_MAX = 16
"""Readers of events at a time; the next one is answered 503."""
EVENTS_LINGER_S = 600.0
"""After the last reader left, events are kept for this long, for its coming back."""
EVENTS_POLL_S = 0.05
"""A reader hears of an event at most this much later."""
EVENTS_ALIVE_S = 10.0
"""A reader that hears nothing for three times this is cut off."""

assert LOOKUP_KEYS_MAX * (KEY_BYTES + TOKEN_DIGEST_BYTES) < BODY_BYTES_MAX
assert PAYLOAD_BYTES_MAX <= BATCH_BYTES_MAX
assert STATE_BYTES_MAX <= BATCH_BYTES_MAX
assert PAYLOAD_BYTES_MAX <= STATE_BYTES_MAX <= IN_FLIGHT_BYTES_MAX and PUT_BUFFER_BYTES <= IN_FLIGHT_BYTES_MAX
assert SEGMENT_BYTES_MIN <= SEGMENT_BYTES_DEFAULT <= SEGMENT_BYTES_MAX
assert EVENT_BLOCKS_MAX * 1000 <= EVENT_LINE_BYTES_MAX
assert EVENT_BLOCKS_MAX * 4 * KEY_BYTES <= EVENTS_BYTES_MAX and EVENTS_POLL_S < EVENTS_ALIVE_S < EVENTS_LINGER_S
assert 0 < LEASE_S <= FRAME_S_MAX and DESCRIPTORS_MAX <= BATCH_BLOCKS_MAX
assert max(HELLO_S_MAX, STALL_S_MAX) <= FRAME_S_MAX <= IDLE_S_MAX
