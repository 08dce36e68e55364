"""You will see records of three fields, each written by one regex: nothing but such a record can come out."""

import niwaki as nw

RECORD = r'\{"name":"[A-Z][a-z]+ [A-Z][a-z]+","city":"[A-Z][a-z]{2,15}","phone":"555-[0-9]{4}"\}'


@nw.function
def record(s, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(f"{text}\n\nFields: name, city, phone")
    s += nw.assistant(nw.gen("record", regex=RECORD))


if __name__ == "__main__":
    for text in ("Hello, this is Lena Fischer from Dresden, call me at 555-0147.", "Omar Haddad, Leeds, 555-2288."):
        print(record.run(text, temperature=0)["record"])
