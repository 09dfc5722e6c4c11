"""Countries: the table that the demo model learns capitals, languages, continents and flags from."""

from __future__ import annotations

from dataclasses import dataclass

# country (as it stands after "of") | capital | continent | language | ISO code of the flag | a sentence on the capital
_TABLE = """
France|Paris|Europe|French|FR|It lies on the Seine and is famous for the Eiffel Tower.
Germany|Berlin|Europe|German|DE|It lies on the Spree and is known for the Brandenburg Gate.
Italy|Rome|Europe|Italian|IT|It lies on the Tiber and is known for the Colosseum.
Spain|Madrid|Europe|Spanish|ES|It is home to the Prado museum.
Portugal|Lisbon|Europe|Portuguese|PT|It lies on the Tagus, close to the Atlantic Ocean.
the United Kingdom|London|Europe|English|GB|It lies on the Thames and is known for Big Ben.
England|London|Europe|English|GB|It lies on the Thames and is known for Big Ben.
Scotland|Edinburgh|Europe|English|GB|It is known for its castle on a rock.
Wales|Cardiff|Europe|English|GB|It is a port city with a castle.
Ireland|Dublin|Europe|English|IE|It lies on the river Liffey.
the Netherlands|Amsterdam|Europe|Dutch|NL|It is known for its canals and bicycles.
Belgium|Brussels|Europe|Dutch|BE|It is known for the Grand Place and for chocolate.
Luxembourg|Luxembourg City|Europe|Luxembourgish|LU|It is a small city on high rocks.
Switzerland|Bern|Europe|German|CH|It lies in a bend of the river Aare.
Austria|Vienna|Europe|German|AT|It lies on the Danube and is known for music.
Hungary|Budapest|Europe|Hungarian|HU|It lies on both banks of the Danube.
the Czech Republic|Prague|Europe|Czech|CZ|It lies on the Vltava and is known for the Charles Bridge.
Slovakia|Bratislava|Europe|Slovak|SK|It lies on the Danube, close to Austria.
Slovenia|Ljubljana|Europe|Slovene|SI|It is known for its Dragon Bridge.
Croatia|Zagreb|Europe|Croatian|HR|It lies on the river Sava.
Serbia|Belgrade|Europe|Serbian|RS|It lies where the Sava meets the Danube.
Bosnia and Herzegovina|Sarajevo|Europe|Bosnian|BA|It lies in a valley among mountains.
Montenegro|Podgorica|Europe|Montenegrin|ME|It lies on the river Morača.
Albania|Tirana|Europe|Albanian|AL|It is known for its colourful houses.
North Macedonia|Skopje|Europe|Macedonian|MK|It is known for its old Stone Bridge.
Greece|Athens|Europe|Greek|GR|It is known for the Acropolis.
Bulgaria|Sofia|Europe|Bulgarian|BG|It lies at the foot of Mount Vitosha.
Romania|Bucharest|Europe|Romanian|RO|It is known for its very large parliament building.
Moldova|Chisinau|Europe|Romanian|MD|It is a green city with many parks.
Poland|Warsaw|Europe|Polish|PL|It lies on the Vistula.
Ukraine|Kyiv|Europe|Ukrainian|UA|It lies on the Dnipro.
Belarus|Minsk|Europe|Belarusian|BY|It lies on the river Svislach.
Russia|Moscow|Europe|Russian|RU|It is known for Red Square and the Kremlin.
Lithuania|Vilnius|Europe|Lithuanian|LT|It is known for its old town.
Latvia|Riga|Europe|Latvian|LV|It lies on the Baltic Sea.
Estonia|Tallinn|Europe|Estonian|EE|It lies on the Gulf of Finland.
Finland|Helsinki|Europe|Finnish|FI|It lies on the Gulf of Finland.
Sweden|Stockholm|Europe|Swedish|SE|It is built on fourteen islands.
Norway|Oslo|Europe|Norwegian|NO|It lies at the end of a long fjord.
Denmark|Copenhagen|Europe|Danish|DK|It is known for the statue of the Little Mermaid.
Iceland|Reykjavik|Europe|Icelandic|IS|It is the most northern capital of a sovereign state.
Malta|Valletta|Europe|Maltese|MT|It is a fortress city above the sea.
Cyprus|Nicosia|Europe|Greek|CY|It lies in the middle of the island.
Monaco|Monaco|Europe|French|MC|It is one of the smallest countries in the world.
Turkey|Ankara|Asia|Turkish|TR|It lies in the middle of Anatolia.
Georgia|Tbilisi|Asia|Georgian|GE|It lies on the river Kura.
Armenia|Yerevan|Asia|Armenian|AM|It has a view of Mount Ararat.
Azerbaijan|Baku|Asia|Azerbaijani|AZ|It lies on the Caspian Sea.
Lebanon|Beirut|Asia|Arabic|LB|It lies on the Mediterranean Sea.
Syria|Damascus|Asia|Arabic|SY|It is one of the oldest cities in the world.
Jordan|Amman|Asia|Arabic|JO|It is built on hills.
Iraq|Baghdad|Asia|Arabic|IQ|It lies on the Tigris.
Iran|Tehran|Asia|Persian|IR|It lies at the foot of the Alborz mountains.
Saudi Arabia|Riyadh|Asia|Arabic|SA|It lies in the desert, far from the sea.
Kuwait|Kuwait City|Asia|Arabic|KW|It lies on the Persian Gulf.
Qatar|Doha|Asia|Arabic|QA|It lies on the Persian Gulf.
the United Arab Emirates|Abu Dhabi|Asia|Arabic|AE|It lies on an island in the Persian Gulf.
Oman|Muscat|Asia|Arabic|OM|It lies between mountains and the sea.
Afghanistan|Kabul|Asia|Pashto|AF|It lies high up in a valley of the Hindu Kush.
Pakistan|Islamabad|Asia|Urdu|PK|It is a planned city at the foot of green hills.
India|New Delhi|Asia|Hindi|IN|It is known for the India Gate.
Nepal|Kathmandu|Asia|Nepali|NP|It lies in a valley of the Himalayas.
Bhutan|Thimphu|Asia|Dzongkha|BT|It lies high up in the Himalayas.
Bangladesh|Dhaka|Asia|Bengali|BD|It lies on the river Buriganga.
Thailand|Bangkok|Asia|Thai|TH|It lies on the river Chao Phraya.
Laos|Vientiane|Asia|Lao|LA|It lies on the Mekong.
Cambodia|Phnom Penh|Asia|Khmer|KH|It lies on the Mekong.
Vietnam|Hanoi|Asia|Vietnamese|VN|It lies on the Red River.
Malaysia|Kuala Lumpur|Asia|Malay|MY|It is known for the Petronas Towers.
Singapore|Singapore|Asia|Malay|SG|It is a city and a country at once.
Indonesia|Jakarta|Asia|Indonesian|ID|It lies on the island of Java.
the Philippines|Manila|Asia|Filipino|PH|It lies on the island of Luzon.
China|Beijing|Asia|Chinese|CN|It is known for the Forbidden City.
Mongolia|Ulaanbaatar|Asia|Mongolian|MN|It is one of the coldest capitals in the world.
South Korea|Seoul|Asia|Korean|KR|It lies on the Han river.
North Korea|Pyongyang|Asia|Korean|KP|It lies on the river Taedong.
Japan|Tokyo|Asia|Japanese|JP|It is one of the largest cities in the world.
Kazakhstan|Astana|Asia|Kazakh|KZ|It lies on the river Ishim in the steppe.
Uzbekistan|Tashkent|Asia|Uzbek|UZ|It is an old city of the Silk Road.
Egypt|Cairo|Africa|Arabic|EG|It lies on the Nile, close to the pyramids of Giza.
Libya|Tripoli|Africa|Arabic|LY|It lies on the Mediterranean Sea.
Tunisia|Tunis|Africa|Arabic|TN|It lies close to the ruins of Carthage.
Algeria|Algiers|Africa|Arabic|DZ|It is called the white city.
Morocco|Rabat|Africa|Arabic|MA|It lies on the Atlantic Ocean.
Senegal|Dakar|Africa|French|SN|It is the most western city of the African mainland.
Ghana|Accra|Africa|English|GH|It lies on the Gulf of Guinea.
Nigeria|Abuja|Africa|English|NG|It is a planned city in the middle of the country.
Cameroon|Yaoundé|Africa|French|CM|It is built on hills.
Ethiopia|Addis Ababa|Africa|Amharic|ET|Its name means new flower.
Kenya|Nairobi|Africa|Swahili|KE|It has a national park with lions and giraffes.
Uganda|Kampala|Africa|English|UG|It lies close to Lake Victoria.
Rwanda|Kigali|Africa|Kinyarwanda|RW|It is a very clean city among hills.
Tanzania|Dodoma|Africa|Swahili|TZ|It lies in the middle of the country.
Zambia|Lusaka|Africa|English|ZM|It lies on a high plateau.
Zimbabwe|Harare|Africa|English|ZW|It is known for its purple jacaranda trees.
Namibia|Windhoek|Africa|English|NA|It lies on a high plateau.
Angola|Luanda|Africa|Portuguese|AO|It lies on the Atlantic Ocean.
Mozambique|Maputo|Africa|Portuguese|MZ|It lies on the Indian Ocean.
Madagascar|Antananarivo|Africa|Malagasy|MG|It is built on hills in the middle of the island.
Canada|Ottawa|North America|English|CA|It is known for skating on the Rideau Canal.
the United States|Washington|North America|English|US|It is known for the White House.
Mexico|Mexico City|North America|Spanish|MX|It was built on the site of Tenochtitlan.
Cuba|Havana|North America|Spanish|CU|It is known for old cars and music.
Jamaica|Kingston|North America|English|JM|It is the home of reggae.
Haiti|Port-au-Prince|North America|French|HT|It lies on a bay of the Caribbean Sea.
Guatemala|Guatemala City|North America|Spanish|GT|It lies in a valley among volcanoes.
Panama|Panama City|North America|Spanish|PA|It lies at the Pacific end of the Panama Canal.
Costa Rica|San José|North America|Spanish|CR|It lies in a green valley where coffee grows.
Colombia|Bogotá|South America|Spanish|CO|It lies high up in the Andes.
Venezuela|Caracas|South America|Spanish|VE|It lies in a valley close to the Caribbean Sea.
Ecuador|Quito|South America|Spanish|EC|It lies almost on the equator.
Peru|Lima|South America|Spanish|PE|It lies on the Pacific Ocean.
Chile|Santiago|South America|Spanish|CL|It lies in a valley with a view of the Andes.
Argentina|Buenos Aires|South America|Spanish|AR|It is the home of the tango.
Uruguay|Montevideo|South America|Spanish|UY|It lies on the Río de la Plata.
Paraguay|Asunción|South America|Spanish|PY|It lies on the river Paraguay.
Brazil|Brasília|South America|Portuguese|BR|It was planned in the shape of an aeroplane.
Australia|Canberra|Oceania|English|AU|It is a planned city between Sydney and Melbourne.
New Zealand|Wellington|Oceania|English|NZ|It is known for its strong winds.
Fiji|Suva|Oceania|English|FJ|It lies on the island of Viti Levu.
"""


@dataclass(frozen=True, slots=True)
class Country:
    """One row of the table."""

    name: str
    capital: str
    continent: str
    language: str
    flag: str
    about_capital: str


def _flag(code: str) -> str:
    """The flag emoji of a two-letter country code: two regional indicators, four bytes each in UTF-8."""
    return "".join(chr(0x1F1E6 + ord(letter) - ord("A")) for letter in code)


def _read(line: str) -> Country:
    name, capital, continent, language, code, about_capital = line.split("|")
    return Country(name, capital, continent, language, _flag(code), about_capital)


COUNTRIES: tuple[Country, ...] = tuple(_read(line) for line in _TABLE.strip().splitlines())
