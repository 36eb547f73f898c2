"""The words of the logs; arrays hold their positions in these tuples."""

from enum import IntEnum

SURFACES = ("feed", "reels", "messaging")
FORMATS = ("image", "video", "carousel", "story")
GOALS = ("awareness", "traffic", "sales")
DEVICES = ("android", "ios", "web")
CONNECTIONS = ("wifi", "4g", "5g")
AGE_BANDS = ("18-24", "25-34", "35-44", "45-54", "55+")
COUNTRIES = ("BR", "DE", "IN", "JP", "NG", "US")
TIERS = ("basic", "plus", "premium")

VIDEO = FORMATS.index("video")
SALES = GOALS.index("sales")
WIFI = CONNECTIONS.index("wifi")


class EventType(IntEnum):
    """Types of events; organic ones first, then those about an ad."""

    POST_VIEW = 0
    POST_LIKE = 1
    MESSAGE_SENT = 2
    POST_PURCHASE = 3
    AD_IMPRESSION = 4
    AD_VIEW = 5
    AD_LONG_VIEW = 6
    AD_CLICK = 7
    CONVERSION = 8


EVENT_TYPES = tuple(kind.name.lower() for kind in EventType)
