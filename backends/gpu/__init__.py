"""GPUs as they really are: one contract over NVML (this host), a DCGM exporter (any host), and none at all.

base        what one card tells, each field a value or the reason why there is none; what one read is
throttle    why a card holds its clocks down, in words
combine     several cards of one engine (tensor parallel) as one, and what is wrong between them
energy      joules over time, from a counter or from power
nvml        this host's cards, through pynvml in a thread of its own; devices: which of them
dcgm        any host's cards, from the text of a DCGM exporter or of `headrace gpu-exporter`
none        no telemetry
"""
