"""A chat with a session: each turn sends only its new text, and a turn can be continued more than once."""

from aioengine import Engine

QUESTIONS = ["What is the capital of Japan?", "What is the capital of Egypt?"]
BRANCHES = ["What is the capital of Peru?", "What is the capital of Norway?"]

with Engine() as llm:
    session = llm.open_session(timeout=600)
    params = {"temperature": 0, "max_new_tokens": 48}
    rid = None
    for question in QUESTIONS:
        print(f"> {question}")
        turn = {"id": session, "rid": rid}
        for chunk in llm.chat([{"role": "user", "content": question}], params, stream=True, session_params=turn):
            print(chunk["text"], end="", flush=True)
            rid = chunk["meta_info"]["id"]
        print()

    # Two branches of the same turn. They share its history.
    chats = [[{"role": "user", "content": question}] for question in BRANCHES]
    for question, answer in zip(
        BRANCHES, llm.chat(chats, params, session_params={"id": session, "rid": rid}), strict=True
    ):
        info = answer["meta_info"]
        print(f"> {question}\n{answer['text']}")
        print(f"[{info['cached_tokens']} of {info['prompt_tokens']} prompt tokens were not computed again]")
    llm.close_session(session)
