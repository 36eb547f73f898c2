"""Audiences: how good labels of data providers are."""
