"""Asking servers of others that speak OpenAI's chat protocol, and keeping what they say."""
