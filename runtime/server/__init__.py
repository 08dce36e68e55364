"""The HTTP server: OpenAI's API and SGLang's /generate in front of one engine. Needs the extra `niwaki[server]`."""
