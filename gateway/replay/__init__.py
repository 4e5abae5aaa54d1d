"""Replay: the gateway's dispatcher, queue and policies in virtual time, before engines that are computed."""
